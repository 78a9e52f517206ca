"""HTTP client of one engine's control routes: pause, update weights, load adapters, read versions."""

from typing import Any, TypeVar

import msgspec
import structlog

from envs.remote.service_client import describe_response
from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.connection_pool import ConnectionPool, decode_response
from workers.engine_api.engine_queries import WEIGHT_INFO_PATH, check_health, fetch_weight_name
from workers.engine_api.wire import UNNAMED_WEIGHTS, WeightInfo, policy_version

log = structlog.get_logger()

_INFO_TIMEOUT_S = 5.0
_STEP_TIMEOUT_S = 60.0
"""For calls that wait for at most one step of the engine."""
_UNVERSIONED_NAMES = ("default", UNNAMED_WEIGHTS, None)
"""Names that engines give to weights without a version."""
_REFUSED, _UNCHANGED, _ALREADY_OPEN = "penstock-vllm refuses", "the old weights stay", "already active"
"""Phrases in the body of a 500: vLLM answers every exception in a worker with that status."""

_JsonObject = dict[str, Any]
T = TypeVar("T")


class PartialUpdateError(EngineError):
    """The engine may hold old weights, new weights or a mixture: it must not resume."""


class EngineControlClient:
    """Client of one engine's control routes.

    Every call opens a connection of its own: after a 500 vLLM resets connections that were kept alive. Every failure is
    an `EngineError`.

    Args:
        url: base URL of the engine, without a trailing slash.
        update_timeout_s: timeout of a call that moves weights.
    """

    def __init__(self, url: str, update_timeout_s: float) -> None:
        self.url = url
        self.update_timeout_s = update_timeout_s
        self._update_left_open = False
        """Our last update was refused in its final step, which leaves it open in one of the engine's workers."""
        self._logged_foreign_version: str | None = None
        """Name that another client gave to the weights; logged once."""

    async def pause(self, *, keep_kv_cache: bool) -> None:
        """Pause running requests.

        Args:
            keep_kv_cache: keep the KV cache. Otherwise it is recomputed with the new weights, and cached prefixes are
                cleared.
        """
        await self._post(f"/pause?mode=keep&clear_cache={str(not keep_kv_cache).lower()}")

    async def resume(self) -> None:
        """Resume paused requests."""
        await self._post("/resume")

    async def start_update(self) -> None:
        """Open an update, or continue one that a killed trainer left open."""
        try:
            await self._post("/start_weight_update")
        except EngineError as error:
            if _ALREADY_OPEN not in str(error):
                raise
            if not self._update_left_open and (workers := await self.world_size()) > 1:
                # vLLM reads one worker's refusal and takes the others for answers to later calls. Another try would
                # leave more of them unread.
                raise EngineRefusedError(
                    f"{self.url} has an unfinished weight update and {workers} workers, whose answers vLLM mixes up "
                    "after this error; restart it"
                ) from error
        self._update_left_open = False

    async def update_weights(self, info: dict[str, Any]) -> None:
        """Send the location of the weights, or announce a transfer."""
        await self._post("/update_weights", {"update_info": info}, sends_weights=True)

    async def finish_update(self, version: int) -> None:
        """Finish the update and set the weights' version.

        Raises:
            EngineRefusedError: the weights do not fit the engine's model; it keeps the old ones.
            PartialUpdateError: the update failed, and the engine does not confirm that it kept the old weights.
        """
        try:
            await self._post("/finish_weight_update", {"weight_version": str(version)}, sends_weights=True)
        except EngineRefusedError:
            self._update_left_open = True
            raise
        except EngineError as error:
            if _UNCHANGED in str(error):
                self._update_left_open = True
                raise
            raise PartialUpdateError(str(error)) from error

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Set up the engine's side of a transfer."""
        await self._post("/init_weight_transfer_engine", {"init_info": info}, sends_weights=True)

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter; from then on the engine accepts requests that name it.

        Raises:
            EngineRefusedError: another adapter has that name.
            EngineError: the engine cannot read it, or has no such route.
        """
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, sends_weights=True)

    async def unload_adapter(self, name: str) -> None:
        """Stop accepting requests that name this adapter; running ones finish."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def loaded_adapters(self) -> dict[str, str]:
        """Return the path of each loaded adapter, by name."""
        models = (await self._get("/v1/models", _JsonObject)).get("data", [])
        return {str(model["id"]): str(model["root"]) for model in models if model.get("parent")}

    async def set_weight_version(self, version: int) -> None:
        """Set the version of the weights that the engine holds."""
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def merges_adapters(self) -> bool:
        """Whether the engine adds adapters to its weights, as the local engine does."""
        try:
            return (await self._get(WEIGHT_INFO_PATH, WeightInfo)).merges_adapters
        except EngineRefusedError:  # a vLLM without this route; its check names the remedy
            return False

    async def server_config(self, name: str) -> Any:
        """Return one part of the configuration that the engine was started with; None if it has no such part.

        Raises:
            EngineRefusedError: the engine does not report it.
        """
        config = await self._get("/server_info?config_format=json", _JsonObject, timeout_s=_STEP_TIMEOUT_S)
        try:
            return config["vllm_config"][name]
        except (KeyError, TypeError) as error:
            raise EngineRefusedError(f"{self.url}/server_info does not report {name}") from error

    async def weight_version(self) -> int | None:
        """Return the policy version of the engine's weights; None if it is not a number of ours.

        Raises:
            EngineError: the engine does not answer.
        """
        async with ConnectionPool(keep_alive=False) as connections:
            name = await fetch_weight_name(connections, self.url, _INFO_TIMEOUT_S)
        version = policy_version(name)
        if version is None and name not in (*_UNVERSIONED_NAMES, self._logged_foreign_version):
            self._logged_foreign_version = name
            log.warning("engine.foreign_weights", url=self.url, version=name)
        return version

    async def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return bool((await self._get("/is_paused", _JsonObject)).get("is_paused"))

    async def world_size(self) -> int:
        """Return the number of the engine's workers; 1 if it does not report it."""
        try:
            return int((await self._get("/get_world_size", _JsonObject)).get("world_size", 1))
        except (EngineRefusedError, TypeError, ValueError):
            return 1

    async def transfer_backend(self) -> str | None:
        """Return the weight-transfer backend that the engine was started with; None if it does not report it.

        Raises:
            EngineRefusedError: the engine has no control routes; the message names the missing option.
        """
        try:
            await self._get(WEIGHT_INFO_PATH, _JsonObject)
        except EngineRefusedError as error:
            raise EngineRefusedError(
                f"{self.url} has no route that takes weights ({error}); start vLLM with VLLM_SERVER_DEV_MODE=1 in its "
                "environment, on a network that you trust"
            ) from error
        try:
            config = await self.server_config("weight_transfer_config")
            return "" if config is None else str(config["backend"])
        except (EngineRefusedError, KeyError, TypeError):
            return None

    async def is_healthy(self) -> bool:
        """Whether the engine answers 200 at `/health`."""
        async with ConnectionPool(keep_alive=False) as connections:
            try:
                await check_health(connections, self.url, _INFO_TIMEOUT_S)
            except EngineError:
                return False
        return True

    async def _get(self, path: str, kind: type[T], timeout_s: float | None = None) -> T:
        status, payload = await self._send("GET", path, timeout_s or _INFO_TIMEOUT_S)
        return decode_response(status, payload, self.url + path, msgspec.json.Decoder(kind))

    async def _post(self, path: str, body: dict[str, Any] | None = None, *, sends_weights: bool = False) -> None:
        timeout_s = self.update_timeout_s if sends_weights else min(_STEP_TIMEOUT_S, self.update_timeout_s)
        status, payload = await self._send("POST", path, timeout_s, msgspec.json.encode(body) if body else None)
        if status == 200:
            return
        message = describe_response(self.url + path, status, payload)
        # A 400 is a verdict on the weights only if the call sent any.
        refused = (sends_weights and status == 400) or _REFUSED in message
        raise (EngineRefusedError if refused else EngineError)(message)

    async def _send(self, method: str, path: str, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
        async with ConnectionPool(keep_alive=False) as connection:
            return await connection.request(method, self.url + path, timeout_s, body)

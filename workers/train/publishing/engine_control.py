"""One engine's control routes: what it is told, and what its answers mean."""

from typing import Any, TypeVar

import msgspec
import structlog

from envs.remote.service_client import describe_response
from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.connection import ConnectionPool, decode_response
from workers.engine_api.wire import UNNAMED_WEIGHTS, WeightInfo, policy_version

log = structlog.get_logger()

_INFO_TIMEOUT_S = 5.0
_STEP_TIMEOUT_S = 60.0
"""Calls that only wait for a step of the engine."""
_UNVERSIONED_NAMES = ("default", UNNAMED_WEIGHTS, None)
"""What engines call weights that were never given a version."""
_REFUSED, _UNCHANGED, _ALREADY_OPEN = "penstock-vllm refuses", "the old weights stay", "already active"
"""Words in the body of a 500: vLLM answers every exception of a worker so."""

_JsonObject = dict[str, Any]
T = TypeVar("T")


class PartialUpdateError(EngineError):
    """Nobody knows whether the engine holds the old weights, the new ones or a mixture: it must not go on."""


class EngineControlClient:
    """One engine, as a publisher knows it.

    Every call is a connection of its own: after a 500 vLLM resets the one that was kept alive. Whatever goes wrong with
    one is an `EngineError`.

    Args:
        url: its base URL, without a slash at its end.
        update_timeout_s: for one call that moves weights.
    """

    def __init__(self, url: str, update_timeout_s: float) -> None:
        self.url = url
        self.update_timeout_s = update_timeout_s
        self._update_left_open = False
        """An update of ours was refused in its last step, which leaves it open in one of the workers."""
        self._logged_foreign_version: str | None = None
        """What somebody else has called its weights, so that it is told once."""

    async def pause(self, *, keep_kv: bool) -> None:
        """Freeze the requests under way.

        Args:
            keep_kv: leave the keys and values that they have; else they are computed again with the new weights, and
                cached prefixes are forgotten.
        """
        await self._post(f"/pause?mode=keep&clear_cache={str(not keep_kv).lower()}")

    async def resume(self) -> None:
        """Go on."""
        await self._post("/resume")

    async def start_update(self) -> None:
        """Open an update, or take over one that a trainer left open which was killed."""
        try:
            await self._post("/start_weight_update")
        except EngineError as error:
            if _ALREADY_OPEN not in str(error):
                raise
            if not self._update_left_open and (workers := await self.world_size()) > 1:
                # Each worker's refusal is an answer, of which vLLM reads the first: the others are taken for answers of
                # later calls.
                raise EngineRefusedError(  # another try would mix up more of them
                    f"{self.url} has an update open that nobody finished, and {workers} workers, whose answers vLLM "
                    "mixes up from here on; restart it"
                ) from error
        self._update_left_open = False

    async def update_weights(self, info: dict[str, Any]) -> None:
        """Tell it where the weights are, or that they come."""
        await self._post("/update_weights", {"update_info": info}, sends_weights=True)

    async def finish_update(self, version: int) -> None:
        """Close the update under its version.

        Raises:
            EngineRefusedError: the weights are not its model's; it has the old ones.
            PartialUpdateError: it failed, and does not say that it has the old ones.
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
        """Have it set up its side of a transfer."""
        await self._post("/init_weight_transfer_engine", {"init_info": info}, sends_weights=True)

    async def load_adapter(self, name: str, path: str) -> None:
        """Have it read an adapter, which takes requests by that name from then on.

        Raises:
            EngineRefusedError: it has another one of that name.
            EngineError: it cannot read it, or has no such route.
        """
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, sends_weights=True)

    async def unload_adapter(self, name: str) -> None:
        """Have it take no more requests by that name; those under way go on."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def loaded_adapters(self) -> dict[str, str]:
        """The path of each adapter that it takes requests for, by name."""
        models = (await self._get("/v1/models", _JsonObject)).get("data", [])
        return {str(model["id"]): str(model["root"]) for model in models if model.get("parent")}

    async def set_weight_version(self, version: int) -> None:
        """Give a version to what it has."""
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def server_config(self, name: str) -> Any:
        """A part of the configuration that it was started with, None where it was started without that part.

        Raises:
            EngineRefusedError: it does not say.
        """
        told = await self._get("/server_info?config_format=json", _JsonObject, timeout_s=_STEP_TIMEOUT_S)
        try:
            return told["vllm_config"][name]
        except (KeyError, TypeError) as error:
            raise EngineRefusedError(f"{self.url}/server_info says nothing of {name}") from error

    async def weight_version(self) -> int | None:
        """Of its weights; None where they have none, or one that is not ours.

        Raises:
            EngineError: it does not say.
        """
        name = (await self._get("/weight_info", WeightInfo)).weight_version
        version = policy_version(name)
        if version is None and name not in (*_UNVERSIONED_NAMES, self._logged_foreign_version):
            self._logged_foreign_version = name
            log.warning("engine.foreign_weights", url=self.url, version=name)
        return version

    async def is_paused(self) -> bool:
        """Whether it is frozen."""
        return bool((await self._get("/is_paused", _JsonObject)).get("is_paused"))

    async def world_size(self) -> int:
        """Its workers; an engine that does not say has one."""
        try:
            return int((await self._get("/get_world_size", _JsonObject)).get("world_size", 1))
        except (EngineRefusedError, TypeError, ValueError):
            return 1

    async def transfer_backend(self) -> str | None:
        """The weight-transfer backend that it was started with; None where it does not say.

        Raises:
            EngineRefusedError: it has no control routes, or was started without one; says what is missing.
        """
        try:
            await self._get("/weight_info", _JsonObject)
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
        """Whether there is an engine that answers."""
        try:
            status, _ = await self._send("GET", "/health", _INFO_TIMEOUT_S)
        except EngineError:
            return False
        return status == 200

    async def _get(self, path: str, kind: type[T], timeout_s: float | None = None) -> T:
        status, payload = await self._send("GET", path, timeout_s or _INFO_TIMEOUT_S)
        return decode_response(status, payload, self.url + path, msgspec.json.Decoder(kind))

    async def _post(self, path: str, body: dict[str, Any] | None = None, *, sends_weights: bool = False) -> None:
        timeout_s = self.update_timeout_s if sends_weights else min(_STEP_TIMEOUT_S, self.update_timeout_s)
        status, payload = await self._send("POST", path, timeout_s, msgspec.json.encode(body) if body else None)
        if status == 200:
            return
        told = describe_response(self.url + path, status, payload)
        # A 400 is a fact about what was sent only where something was.
        refused = (sends_weights and status == 400) or _REFUSED in told
        raise (EngineRefusedError if refused else EngineError)(told)

    async def _send(self, method: str, path: str, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
        async with ConnectionPool(keep_alive=False) as connection:
            return await connection.request(method, self.url + path, timeout_s, body)

"""LoRA adapters in vLLM: each policy version is loaded under a name and from a folder of its own.

One adapter samples a whole request, so the request's version is known from the start; running requests finish on their
adapter while newer ones are loaded. Nothing is paused and no cache is cleared: vLLM keeps cached prefixes apart by the
adapter's name and path, and neither is used twice.

vLLM's `load_inplace`, which replaces an adapter under its name, is not used: running requests then continue with new
weights on the old KV cache, or fall back to the old weights under the same name, and no answer reveals which.
"""

from pathlib import Path

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.wire import ADAPTER_PREFIX, adapter_name
from workers.train.publishing.engine_control import EngineControlClient

_LOADED_VERSIONS = 2
"""Newest adapters that stay loaded: a client may have named the older one a moment ago."""

_NOT_FOUND = "No adapter found"
"""vLLM's message for a path without an adapter."""
_ROUTE_DISABLED = (403, 404, 405)


class AdapterUpdate:
    """Loads the new adapter, sets the engine's version, unloads old adapters. A `WeightTransport`.

    Args:
        rank: LoRA rank of the adapters.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    async def prepare(self, path: Path) -> None:
        """Nothing to do: the files are in place."""

    async def check(self, engine: EngineControlClient) -> None:
        """See `WeightTransport`."""
        try:
            config = await engine.server_config("lora_config")
        except EngineRefusedError as error:
            raise EngineRefusedError(
                f"{engine.url} takes no adapters: it is a vLLM without VLLM_SERVER_DEV_MODE=1, or another server "
                f"({error}); set weights.transport = 'files', or {self._start_hint}"
            ) from error
        if config is None:
            raise EngineRefusedError(f"{engine.url} was started without --enable-lora; {self._start_hint}")
        if config["max_lora_rank"] < self._rank:
            raise EngineRefusedError(
                f"{engine.url} was started with --max-lora-rank {config['max_lora_rank']}, less than lora.rank "
                f"({self._rank}); {self._start_hint}"
            )
        if config["max_loras"] < _LOADED_VERSIONS:
            raise EngineRefusedError(
                f"{engine.url} was started with --max-loras {config['max_loras']}, so a new version would wait for all "
                f"requests of the one before; {self._start_hint}"
            )

    async def send(self, engine: EngineControlClient, path: Path, version: int) -> None:
        """See `WeightTransport`. Sets the version last: from then on requests name the new adapter."""
        name = adapter_name(version)
        loaded = await engine.loaded_adapters()
        if loaded.get(name) != str(path):
            if name in loaded:
                await engine.unload_adapter(name)
            await self._load(engine, name, path)
        await engine.set_weight_version(version)
        numbers = (other.removeprefix(ADAPTER_PREFIX) for other in loaded if other.startswith(ADAPTER_PREFIX))
        older = sorted(number for number in map(int, filter(str.isdecimal, numbers)) if number != version)
        for number in older[: -(_LOADED_VERSIONS - 1)]:
            await engine.unload_adapter(adapter_name(number))

    async def abort(self, engine: EngineControlClient, error: Exception) -> None:
        """Nothing to do: the engine was never paused."""

    async def _load(self, engine: EngineControlClient, name: str, path: Path) -> None:
        try:
            await engine.load_adapter(name, str(path))
        except EngineRefusedError:
            raise
        except EngineError as error:
            message = str(error)
            if _NOT_FOUND in message:
                raise EngineRefusedError(
                    f"{engine.url} finds no adapter at {path}: it must see the run's folder under the same path; share "
                    "it, or set weights.transport = 'http'"
                ) from error
            if any(f"answers {status}" in message for status in _ROUTE_DISABLED):
                raise EngineRefusedError(
                    f"{engine.url} cannot load adapters at run time; {self._start_hint}"
                ) from error
            raise

    @property
    def _start_hint(self) -> str:
        return (
            "start vLLM with VLLM_SERVER_DEV_MODE=1 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, "
            f"--enable-lora, --max-loras 4 and a --max-lora-rank of {self._rank} or more"
        )

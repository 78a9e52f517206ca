"""LoRA adapters into an engine that goes on: each version under a name of its own, read from a folder of its own.

A request is sampled by one adapter from its first token to its last, so its version is known from the beginning; those
under way go on with theirs while newer ones come. Nothing is frozen, and no cache is forgotten: vLLM keeps cached
prefixes apart by the adapter's name and path, and neither is ever used twice.

vLLM can also replace an adapter under its name (`load_inplace`). It is not used: requests under way then go on with the
new weights and the keys and values of the old, or fall back to the old weights at their next step, which they still
name, and nothing that the engine says tells which.
"""

from pathlib import Path

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.wire import ADAPTER_PREFIX, adapter_name
from workers.train.publishing.engine_control import EngineControlClient

_LOADED_VERSIONS = 2
"""Newest adapters that an engine takes requests for: one may have been named by a client just now."""

_NOT_FOUND = "No adapter found"
"""In these words vLLM says that there is nothing at a path."""
_ROUTE_DISABLED = (403, 404, 405)


class AdapterUpdate:
    """Load under a new name, announce, unload the old; a `Way`.

    Args:
        rank: of the adapters.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    async def prepare(self, path: Path) -> None:
        """It is there."""

    async def check(self, engine: EngineControlClient) -> None:
        """See `Way`."""
        try:
            config = await engine.server_config("lora_config")
        except EngineRefusedError as error:
            raise EngineRefusedError(
                f"{engine.url} takes no adapters: it is the local engine, or a vLLM without VLLM_SERVER_DEV_MODE=1 "
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
        """See `Way`. Requests name the new version as soon as the engine says that it has it, so that comes second."""
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

    async def _load(self, engine: EngineControlClient, name: str, path: Path) -> None:
        try:
            await engine.load_adapter(name, str(path))
        except EngineRefusedError:
            raise
        except EngineError as error:
            told = str(error)
            if _NOT_FOUND in told:
                raise EngineRefusedError(
                    f"{engine.url} finds no adapter at {path}: it must see the run's folder under the same path; share "
                    "it, or set weights.transport = 'http'"
                ) from error
            if any(f"answers {status}" in told for status in _ROUTE_DISABLED):
                raise EngineRefusedError(f"{engine.url} loads no adapters while it runs; {self._start_hint}") from error
            raise

    async def abort(self, engine: EngineControlClient, error: Exception) -> None:
        """Nothing was taken from it."""

    @property
    def _start_hint(self) -> str:
        return (
            "start vLLM with VLLM_SERVER_DEV_MODE=1 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, "
            f"--enable-lora, --max-loras 4 and a --max-lora-rank of {self._rank} or more"
        )

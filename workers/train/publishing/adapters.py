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
from workers.engine.wire import ADAPTER, adapter_name
from workers.train.publishing.control import Control

_KEPT = 2
"""Newest adapters that an engine takes requests for: one may have been named by a client just now."""

_NOT_THERE = "No adapter found"
"""In these words vLLM says that there is nothing at a path."""
_CLOSED = (403, 404, 405)


class Adapters:
    """Load under a new name, announce, unload the old; a `Way`.

    Args:
        rank: of the adapters.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    async def prepare(self, path: Path) -> None:
        """It is there."""

    async def check(self, engine: Control) -> None:
        """See `Way`."""
        try:
            config = await engine.setting("lora_config")
        except EngineRefusedError as error:
            raise EngineRefusedError(
                f"{engine.url} takes no adapters: it is the local engine, or a vLLM without VLLM_SERVER_DEV_MODE=1 "
                f"({error}); set lora.publish = 'merged', or {self._started_as}"
            ) from error
        if config is None:
            raise EngineRefusedError(f"{engine.url} was started without --enable-lora; {self._started_as}")
        if config["max_lora_rank"] < self._rank:
            raise EngineRefusedError(
                f"{engine.url} was started with --max-lora-rank {config['max_lora_rank']}, less than lora.rank "
                f"({self._rank}); {self._started_as}"
            )
        if config["max_loras"] < _KEPT:
            raise EngineRefusedError(
                f"{engine.url} was started with --max-loras {config['max_loras']}, so a new version would wait for all "
                f"requests of the one before; {self._started_as}"
            )

    async def give(self, engine: Control, path: Path, version: int) -> None:
        """See `Way`. Requests name the new version as soon as the engine says that it has it, so that comes second."""
        name = adapter_name(version)
        loaded = await engine.adapters()
        if loaded.get(name) != str(path):
            if name in loaded:
                await engine.unload_adapter(name)
            await self._load(engine, name, path)
        await engine.name_version(version)
        numbers = (other.removeprefix(ADAPTER) for other in loaded if other.startswith(ADAPTER))
        older = sorted(number for number in map(int, filter(str.isdecimal, numbers)) if number != version)
        for number in older[: -(_KEPT - 1)]:
            await engine.unload_adapter(adapter_name(number))

    async def _load(self, engine: Control, name: str, path: Path) -> None:
        try:
            await engine.load_adapter(name, str(path))
        except EngineRefusedError:
            raise
        except EngineError as error:
            told = str(error)
            if _NOT_THERE in told:
                raise EngineRefusedError(
                    f"{engine.url} finds no adapter at {path}: it must see the run's folder under the same path; share "
                    "it, or set lora.publish = 'merged', which [weights] can send over HTTP"
                ) from error
            if any(f"answers {status}" in told for status in _CLOSED):
                raise EngineRefusedError(f"{engine.url} loads no adapters while it runs; {self._started_as}") from error
            raise

    async def let_go(self, engine: Control, error: Exception) -> None:
        """Nothing was taken from it."""

    @property
    def _started_as(self) -> str:
        return (
            "start vLLM with VLLM_SERVER_DEV_MODE=1 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, "
            f"--enable-lora, --max-loras 4 and a --max-lora-rank of {self._rank} or more"
        )

"""Whether a run fits into memory, before anything is started: the trainer's peak beside all other processes.

On a machine without a GPU all processes share main memory; on one with a GPU the trainer has the GPU's. What does not
fit is an error, with the setting that helps most.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import psutil
from msgspec import Struct
from msgspec.structs import replace

from stream.errors import PenstockError
from stream.wording import format_bytes
from workers.check.model import ModelFacts
from workers.check.report import Checker
from workers.role.memory import Memory, PassMemory, engine_cache_bytes, read_memory
from workers.settings import Settings
from workers.train.step.memory_plan import (
    MIN_TOKENS,
    ModelShape,
    OtherProcesses,
    TrainerMemory,
    other_processes,
    plan_memory,
    rough_passes,
)

_HAS_GPU: Final = Path("/dev/nvidiactl").exists()
_GENEROUS: Final = 0.5
"""Below this share of the memory an upper bound is enough, and nothing is measured."""


class RunMemory(Struct, frozen=True, kw_only=True):
    """What a run needs, and what there is."""

    trainer: TrainerMemory
    others: OtherProcesses
    memory: Memory
    parameters: int

    @property
    def budget(self) -> float:
        """What is left for the trainer."""
        return self.memory.available - self.others.total

    def describe(self, tokens: int) -> str:
        """Return the figures with passes over this number of tokens."""
        parts = [f"trainer {format_bytes(self.trainer.peak(tokens))} ({self.trainer.describe()})"]
        parts += [f"engines {format_bytes(self.others.engines)}"] if self.others.engines else []
        parts.append(f"other processes {format_bytes(self.others.roles)}")
        total = self.trainer.peak(tokens) + self.others.total
        return f"{format_bytes(total)}: {', '.join(parts)}"


def trainer_budget(settings: Settings) -> str:
    """Return the bytes that are left for the trainer of a run that is about to start here, and what limits them.

    It is the value of `workers.role.memory.BUDGET`; empty if the model's size is not known.
    """
    shape = ModelShape.read(Path(settings.model.path))
    if shape is None:
        return ""
    memory = _memory_for_a_run()
    others = other_processes(settings, shape.parameters, shape)
    return f"{max(1, int(memory.available - others.total))} ({memory.source})"


def _memory_for_a_run() -> Memory:
    """Return the memory with that of this process, which is the run's supervisor or ends before the run begins."""
    memory, own = read_memory(), psutil.Process().memory_info()
    return replace(memory, available=min(memory.total, memory.available + own.rss - own.shared))


def check_memory(checker: Checker, facts: ModelFacts | None) -> None:
    """Report a run that does not fit into main memory, on a machine without a GPU."""
    settings = checker.settings
    if facts is None or not facts.parameters or _HAS_GPU:
        return
    found = estimate(settings, facts.parameters)
    if found is None:
        return
    given = settings.train.micro_batch_tokens
    tokens = min(MIN_TOKENS, found.trainer.longest) if given == "auto" else given
    peak, longest = found.trainer.peak(tokens), found.trainer.longest
    memory = f"{format_bytes(found.memory.available)} available ({found.memory.source})"
    about = checker.about("memory", "train.micro_batch_tokens" if given != "auto" else "model.path")
    if peak > found.budget:
        what = f"passes over {tokens:,} tokens" if given != "auto" else f"the smallest passes ({tokens} tokens)"
        about.error(
            f"with {what} the run needs {found.describe(tokens)}; this machine has {memory}",
            best_remedy(found, checker),
        )
    elif found.trainer.peak(longest) > found.budget:
        about.warn(
            f"a completion of {longest:,} tokens, the longest that the settings allow, needs "
            f"{found.describe(longest)}; this machine has {memory}",
            "lower rollout.max_tokens or engine.max_model_len; shorter completions fit",
        )


def estimate(settings: Settings, parameters: int) -> RunMemory | None:
    """Return what a run needs; None if the model's configuration does not say, or torch is missing to measure it."""
    folder, memory = Path(settings.model.path), _memory_for_a_run()
    shape = ModelShape.read(folder)
    others = other_processes(settings, parameters, shape)
    if shape is not None and (bound := rough_passes(settings, shape)) is not None:
        trained = shape.adapter_parameters(settings.lora.rank) if settings.lora.rank else parameters
        extra = trained if settings.lora.rank else 0
        found = _plan(settings, parameters + extra, trained, bound, others, memory)
        if found.trainer.peak(found.trainer.longest) <= _GENEROUS * found.budget:
            return found
    if find_spec("torch") is None:
        return None
    from workers.train.model.pass_memory import measure_model

    try:
        model = measure_model(settings, folder)
    except PenstockError:  # the trainer says it, and chooses carefully
        return None
    return _plan(settings, model.parameters, model.trained, model.passes, others, memory)


def _plan(
    settings: Settings,
    parameters: int,
    trained: int,
    passes: PassMemory,
    others: OtherProcesses,
    memory: Memory,
) -> RunMemory:
    trainer = plan_memory(settings, parameters=parameters, trained=trained, passes=passes)
    return RunMemory(trainer=trainer, others=others, memory=memory, parameters=parameters)


def best_remedy(found: RunMemory, checker: Checker) -> str:
    """Return the setting that saves most, and what the run needs with it."""
    settings = checker.settings
    given = settings.train.micro_batch_tokens
    needed = found.trainer.peak(MIN_TOKENS if given == "auto" else given) + found.others.total
    tried: list[tuple[float, str]] = []
    for text, changed in _remedies(settings, found):
        other = estimate(changed, found.parameters)
        if other is not None:
            own = changed.train.micro_batch_tokens
            tokens = min(MIN_TOKENS, other.trainer.longest) if own == "auto" else own
            tried.append((other.trainer.peak(tokens) + other.others.total, text))
    if not tried:
        return "use a smaller model or a larger machine"
    least, text = min(tried)
    if least >= needed:
        return "use a smaller model or a larger machine"
    more = "" if least <= found.memory.available else ", which is still too much: use a smaller model, too"
    return f"{text} helps most: the run then needs {format_bytes(least)}{more}"


def _remedies(settings: Settings, found: RunMemory) -> Iterator[tuple[str, Settings]]:
    """Yield settings that need less, each with its description."""
    train = settings.train
    if not settings.lora.rank and find_spec("peft") is not None:
        yield "[lora] rank = 16", replace(settings, lora=replace(settings.lora, rank=16))
    if train.micro_batch_tokens != "auto":
        changed = replace(settings, train=replace(train, micro_batch_tokens="auto"))
        yield 'train.micro_batch_tokens = "auto"', changed
    if not train.gradient_checkpointing:
        changed = replace(settings, train=replace(train, gradient_checkpointing=True))
        yield "train.gradient_checkpointing = true", changed
    if settings.model.dtype == "float32":
        yield 'model.dtype = "bfloat16"', replace(settings, model=replace(settings.model, dtype="bfloat16"))
    if found.others.engines:
        cache = min(engine_cache_bytes(settings.engine.max_cache_bytes), 200_000_000)
        engine = replace(settings.engine, max_cache_bytes=cache)
        yield f"engine.max_cache_bytes = {cache:_}", replace(settings, engine=engine)
    if settings.lora.rank and not settings.publishes_adapters and settings.engine.server == "local":
        weights = replace(settings.weights, transport="adapter")
        yield "weights.transport = 'adapter'", replace(settings, weights=weights)

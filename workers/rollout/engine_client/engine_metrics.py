"""Load metrics that an engine reports at `/metrics`, in Prometheus' text format under vLLM's names."""

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

_WAITING: Final = "vllm:num_requests_waiting"
_RUNNING: Final = "vllm:num_requests_running"
_KV_CACHE_USAGE: Final = "vllm:kv_cache_usage_perc"
_PREEMPTIONS: Final = "vllm:num_preemptions_total"
_TOKENS: Final = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_NAMES: Final = (_WAITING, _RUNNING, _KV_CACHE_USAGE, _PREEMPTIONS, *_TOKENS)


class EngineMetrics(NamedTuple):
    """One poll of an engine. If a server reports several engine processes, these are the sums over them."""

    waiting: float
    """Requests of all clients that the engine has not started."""
    running: float
    """Requests of all clients that the engine is processing."""
    kv_cache_usage: float
    """Fraction of the KV cache in use, 0 to 1, in the fullest engine process; 0 if the engine does not report it."""
    preemptions: float
    """Requests preempted for lack of KV cache, since the engine started."""
    tokens: float | None
    """Tokens read and sampled since the engine started; None if the engine does not report them."""


def parse_metrics(text: str) -> EngineMetrics | None:
    """Parse the body of `/metrics`; None if it does not report waiting and running requests."""
    found: dict[str, list[float]] = {}
    for name, value in _samples(text):
        found.setdefault(name, []).append(value)
    if _WAITING not in found or _RUNNING not in found:
        return None
    tokens = [value for name in _TOKENS for value in found.get(name, ())]
    return EngineMetrics(
        waiting=sum(found[_WAITING]),
        running=sum(found[_RUNNING]),
        kv_cache_usage=max(found.get(_KV_CACHE_USAGE, [0.0])),
        preemptions=sum(found.get(_PREEMPTIONS, ())),
        tokens=sum(tokens) if tokens else None,
    )


def _samples(text: str) -> Iterator[tuple[str, float]]:
    """Yield name and value of each finite sample under one of the names above.

    Other lines are skipped first: parsing all of vLLM's 450 lines would take 16 ms on the event loop instead of 0.3 ms.
    """
    from prometheus_client.parser import text_string_to_metric_families

    for line in text.splitlines():
        if not line.startswith(_NAMES):
            continue
        try:
            samples = [sample for family in text_string_to_metric_families(line) for sample in family.samples]
        except ValueError:
            continue
        for sample in samples:
            if sample.name in _NAMES and math.isfinite(sample.value):
                yield sample.name, sample.value

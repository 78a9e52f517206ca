"""What an engine says of itself at `/metrics`, in Prometheus' text format and under vLLM's names."""

import math
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_SAMPLE: Final = re.compile(r"^(vllm:\w+)(?:\{[^\n]*\})?[ \t]+(\S+)", re.MULTILINE)
"""A name, labels that may be there, a value. vLLM gives one sample of each name for each of its engine processes."""


class EngineMetrics(NamedTuple):
    """One look at an engine."""

    waiting: float
    """Requests that it has not begun, everybody's."""
    running: float
    kv_cache_usage: float
    """Of its KV cache, 0 to 1; 0 where it does not say."""
    preemptions: float
    """So far: requests that were put back for want of KV cache."""
    tokens: float | None
    """So far, read and sampled; None where it does not say."""


def parse_metrics(text: str) -> EngineMetrics | None:
    """Read what `/metrics` answered; None where it does not tell of requests that wait and run."""
    found: dict[str, list[float]] = {}
    for name, value in _samples(text):
        found.setdefault(name, []).append(value)
    if "vllm:num_requests_waiting" not in found or "vllm:num_requests_running" not in found:
        return None
    tokens = [*found.get("vllm:prompt_tokens_total", ()), *found.get("vllm:generation_tokens_total", ())]
    return EngineMetrics(
        waiting=sum(found["vllm:num_requests_waiting"]),
        running=sum(found["vllm:num_requests_running"]),
        kv_cache_usage=max(found.get("vllm:kv_cache_usage_perc", [0.0])),
        preemptions=sum(found.get("vllm:num_preemptions_total", ())),
        tokens=sum(tokens) if tokens else None,
    )


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for name, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            yield name, number

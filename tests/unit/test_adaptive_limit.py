"""The adaptive limit of requests per engine follows the engine's metrics, within bounds, for several workers."""

import math

from hypothesis import given
from hypothesis import strategies as st

from workers.rollout.engine_client.load import (
    DECREASE,
    INCREASE,
    OVERLOADED_POLLS,
    QUEUE_FRACTION,
    AdaptiveLimit,
    EngineMetrics,
    parse_metrics,
)

LEAST, MOST = 8, 512
counts = st.integers(0, 2000).map(float)


def signals(waiting=0.0, running=64.0, kv_use=0.3, preemptions=0.0, tokens: float | None = None) -> EngineMetrics:
    return EngineMetrics(waiting, running, kv_use, preemptions, tokens)


def after(
    state: AdaptiveLimit, *looks: EngineMetrics, ours: int | None = None, queueing: bool = True, only: bool = False
) -> AdaptiveLimit:
    for look in looks:
        given_out = state.limit if ours is None else ours
        state = state.updated(
            look, in_flight=given_out, has_waiting=queueing, is_only=only, minimum=LEAST, maximum=MOST
        )
    return state


def test_the_limit_rises_while_requests_wait_here_and_none_at_the_engine():
    assert after(AdaptiveLimit(64), signals(), signals()).limit == 4 * 64
    assert after(AdaptiveLimit(64), signals(), queueing=False).limit == 64
    assert after(AdaptiveLimit(64), signals(), ours=60).limit == 64


def test_the_limit_rises_as_far_as_there_is_memory_for():
    assert after(AdaptiveLimit(64), signals(kv_use=0.6)).limit == 64 + 32
    assert after(AdaptiveLimit(64), signals(kv_use=0.89)).limit == 64 + INCREASE
    assert after(AdaptiveLimit(64), signals(kv_use=0.91)).limit == 64
    assert after(AdaptiveLimit(64), signals(kv_use=0.0)).limit == 2 * 64


def test_one_poll_of_a_queue_changes_nothing_and_a_lasting_queue_lowers_the_limit():
    queue = signals(waiting=30)
    assert after(AdaptiveLimit(64), queue).limit == 64
    assert after(AdaptiveLimit(64), queue, signals(), queue, ours=10).limit == 64
    assert after(AdaptiveLimit(64), *[queue] * OVERLOADED_POLLS).limit == math.ceil(64 * DECREASE)


def test_a_queue_never_lowers_the_limit_below_what_the_engine_works_on():
    """Bursts of requests that end together: there is a queue again and again, and the engine can do all of them."""
    assert after(AdaptiveLimit(150), *[signals(waiting=22, running=128)] * 20, ours=150).limit == 141
    assert after(AdaptiveLimit(141), *[signals(waiting=13, running=128)] * 20).limit == 141


def test_an_only_engine_may_have_as_many_waiting_as_it_works_on():
    """Held back here they would be served no sooner, and each worker's share of what runs changes with every batch."""
    assert after(AdaptiveLimit(256), *[signals(waiting=128, running=128)] * 20, only=True).limit == 256
    assert after(AdaptiveLimit(300), *[signals(waiting=172, running=128)] * 20, ours=300, only=True).limit == 256


def test_a_short_queue_keeps_the_engine_busy_and_changes_nothing():
    assert after(AdaptiveLimit(64), *[signals(waiting=5)] * 10).limit == 64


def test_a_full_cache_and_preemptions_lower_the_limit():
    assert after(AdaptiveLimit(64), *[signals(kv_use=0.97)] * OVERLOADED_POLLS).limit == math.ceil(64 * DECREASE)
    assert after(AdaptiveLimit(64), signals(), signals(preemptions=3), ours=60).limit == math.ceil(60 * DECREASE)
    assert after(AdaptiveLimit(64), *[signals(kv_use=0.92)] * 5).limit == 64


def test_a_decrease_starts_from_the_requests_in_flight_not_from_the_limit():
    queue = [signals(waiting=40)] * OVERLOADED_POLLS
    assert after(AdaptiveLimit(MOST), *queue, ours=50).limit == math.ceil(50 * DECREASE)


def test_a_decrease_is_judged_after_the_load_has_fallen():
    down = after(AdaptiveLimit(100), *[signals(waiting=40)] * OVERLOADED_POLLS)
    assert after(down, *[signals(waiting=40)] * 10, ours=100).limit == down.limit


def test_an_engine_without_progress_changes_nothing():
    """The queue of an engine that is paused for new weights grows without an overload."""
    paused = [signals(waiting=200, tokens=1000.0)] * 20
    assert after(AdaptiveLimit(64), signals(tokens=1000.0), *paused).limit == 2 * 64


@given(
    st.integers(LEAST, MOST), st.lists(st.builds(signals, counts, counts, st.floats(0, 1), counts, counts), max_size=30)
)
def test_the_bounds_hold_for_any_metrics(limit, looks):
    state = AdaptiveLimit(limit)
    for look in looks:
        state = after(state, look)
        assert LEAST <= state.limit <= MOST


@given(st.integers(1, 6), st.integers(40, 1000))
def test_several_workers_fill_an_engine_without_a_long_queue(workers, capacity):
    """Simulate an engine that runs `capacity` requests concurrently; each worker has more requests than that."""
    states = [AdaptiveLimit(MOST) for _ in range(workers)]
    queue = []
    for look in range(400):
        asked = sum(state.limit for state in states)
        waiting, running = max(0, asked - capacity), min(asked, capacity)
        seen = signals(float(waiting), float(running), tokens=float(look))
        states = [after(state, seen) for state in states]
        queue.append((waiting, running))
    settled = queue[200:]
    most, least = max(w for w, _ in settled), min(r for _, r in settled)
    assert least == min(capacity, workers * MOST)
    assert most <= QUEUE_FRACTION * capacity + LEAST * workers


VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a b"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a b",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a b"} 0.5
vllm:num_preemptions_total{engine="0",model_name="a b"} 2.0
vllm:num_preemptions_created{engine="0",model_name="a b"} 1.7e+09
vllm:prompt_tokens_total{engine="0",model_name="a b"} 1.2e+03
vllm:generation_tokens_total{engine="0",model_name="a b"} 34.0
"""


def test_vllms_metrics_are_summed_over_its_processes():
    assert parse_metrics(VLLM) == EngineMetrics(1.0, 7.0, 0.5, 2.0, 1234.0)


def test_metrics_without_labels_or_optional_names_are_parsed():
    assert parse_metrics("vllm:num_requests_running 2\nvllm:num_requests_waiting 0\n") == EngineMetrics(
        0, 2, 0, 0, None
    )


def test_metrics_without_request_counts_are_ignored():
    assert parse_metrics("") is None
    assert parse_metrics("<html>not found</html>") is None
    assert parse_metrics("vllm:num_requests_running NaN\nvllm:num_requests_waiting x\n") is None
    assert parse_metrics(f"vllm:num_requests_running {math.inf}") is None

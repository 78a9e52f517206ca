"""Run user code (environments, reward functions) with a deadline, without letting it block or end a worker.

Synchronous functions run in threads, coroutine functions on the event loop. A call returns an `Outcome` instead of
raising, so nothing that user code raises, `SystemExit` included, reaches the worker::

    outcome = await CallRunner(CapacityLimiter(8)).call(env.step, {"action": "left"}, timeout_s=5.0)
    match outcome:
        case Ok(value): ...
        case Failed(error): ...
        case TimedOut(timeout_s): ...
"""

from envs.call.call_memory import call_subject, describe_subject, recorded_call
from envs.call.outcomes import (
    Failed,
    Ok,
    Outcome,
    TimedOut,
    call_inline,
    describe_error,
    describe_failure,
    error_cause,
    is_library,
    outcome_cause,
    replace_surrogates,
)
from envs.call.runner import CallRunner, RateLimiter, filter_kwargs
from envs.call.signatures import call_signature, is_async, is_awaitable
from envs.call.threads import AbandonedThreads, Call, TimedOutcome, abandoned_threads

__all__ = [
    "AbandonedThreads",
    "Call",
    "CallRunner",
    "Failed",
    "Ok",
    "Outcome",
    "RateLimiter",
    "TimedOut",
    "TimedOutcome",
    "abandoned_threads",
    "call_inline",
    "call_signature",
    "call_subject",
    "describe_error",
    "describe_failure",
    "describe_subject",
    "error_cause",
    "filter_kwargs",
    "is_async",
    "is_awaitable",
    "is_library",
    "outcome_cause",
    "recorded_call",
    "replace_surrogates",
]

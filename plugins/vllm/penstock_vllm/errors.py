"""Errors of updates that fail. The trainer reads their messages in the body of vLLM's response.

vLLM answers every exception of a worker with status 500 and quotes it, so the message carries the kind of error.
"""

REFUSED = "penstock-vllm refuses"
"""The update does not fit the model, or does not exist; a retry cannot succeed. The old weights stay."""
FAILED = "penstock-vllm failed"
"""The update could not be read or downloaded completely; a retry may succeed. The old weights stay."""
BROKEN = "penstock-vllm is broken"
"""Loading failed half-way, so the model mixes old and new weights: do not resume before an update has succeeded."""


class UpdateError(Exception):
    """An update failed before it changed the model; the message begins with `REFUSED` or `FAILED`."""


class RefusedError(UpdateError):
    """The update cannot succeed; see `REFUSED`."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{REFUSED}: {why}; the old weights stay")


class FailedError(UpdateError):
    """The update may succeed if it is sent again; see `FAILED`."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{FAILED}: {why}; the old weights stay")

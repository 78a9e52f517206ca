"""Error messages of refused updates. The trainer reads them in the body of vLLM's response.

vLLM answers every exception of a worker with status 500 and quotes it, so the message has to carry the kind of error.
"""

REFUSED = "penstock-vllm refuses"
"""The update is not this model's, or not there: sending it again changes nothing. The old weights stay."""
FAILED = "penstock-vllm failed"
"""It could not be brought here whole; the old weights stay, and it may be sent again."""
BROKEN = "penstock-vllm is broken"
"""It failed while it was brought into the model, which is a mixture now: do not resume before an update went well."""


class UpdateError(Exception):
    """An update that is not taken; the message begins with one of the three."""


class RefusedError(UpdateError):
    """`REFUSED`."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{REFUSED}: {why}; the old weights stay")


class FailedError(UpdateError):
    """`FAILED`."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{FAILED}: {why}; the old weights stay")

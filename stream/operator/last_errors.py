"""The last errors of a run's workers: they explain why nothing moves."""

from datetime import UTC, datetime

from msgspec import Struct

from stream.causes import ErrorCause, parse_cause
from stream.connection.run_connection import RunConnection


class LastError(Struct, frozen=True, kw_only=True):
    """The error by which a worker last gave an entry back."""

    stage: str
    text: str
    """First line of the error."""
    at: datetime
    cause: ErrorCause
    """The exception behind it; without a place if it is not known."""

    def __str__(self) -> str:
        return f"the last error in {self.stage} was at {self.at:%H:%M:%S} UTC: {self.text}"


async def read_last_error(connection: RunConnection) -> LastError | None:
    """Return the newest error of all stages; None if no entry was given back with an error."""
    found = await connection.read_hash("last_errors")
    errors = []
    for stage, value in found.items():
        at_ms, _, text = value.partition(" ")
        errors.append((int(at_ms), stage, text))
    if not errors:
        return None
    time_ms, stage, text = max(errors)
    first_line, _, _ = text.partition("\n")
    return LastError(
        stage=stage,
        text=first_line,
        at=datetime.fromtimestamp(time_ms / 1000, UTC),
        cause=parse_cause(text) or ErrorCause(exception=first_line, source=f"stage {stage}"),
    )

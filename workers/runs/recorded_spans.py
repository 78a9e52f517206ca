"""OpenTelemetry spans of things that are over. Needs the extra `otel`."""

from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from workers.runs.phases import Phase


class SpanIds(RandomIdGenerator):  # type: ignore[misc]
    """Gives each group the trace id that is made of its prompt's id, so that repeated exports agree."""

    trace = 0

    def generate_trace_id(self) -> int:
        """Return the id of the current group's trace."""
        return self.trace


class RecordedSpans:
    """Makes the spans of one trace.

    Args:
        tracer: starts them.
    """

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._made: list[ReadableSpan] = []

    def make(self, span: Phase) -> Sequence[ReadableSpan]:
        """Return the span with all that is in it."""
        self._add(span, Context())
        return self._made

    def _add(self, span: Phase, parent: Context) -> None:
        attributes = {f"penstock.{name}": value for name, value in span.attributes.items()}
        recorded = self._tracer.start_span(
            span.name, parent, attributes=attributes, start_time=_nanoseconds(span.began_at)
        )
        inside = trace.set_span_in_context(recorded, parent)
        for child in span.children:
            self._add(child, inside)
        recorded.end(_nanoseconds(span.ended_at))
        if isinstance(recorded, ReadableSpan):
            self._made.append(recorded)


def _nanoseconds(seconds: float) -> int:
    return round(1_000_000_000 * seconds)

"""Sends spans to an OpenTelemetry collector, with the times that were recorded. Needs the extra `otel`."""

from collections.abc import Iterable, Iterator

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from stream.errors import SettingsError
from workers.runs.phases import Phase, trace_id


class _SpanIds(RandomIdGenerator):  # type: ignore[misc]
    """Gives each group the trace id that is made of its prompt's id, so that repeated exports agree."""

    trace = 0

    def generate_trace_id(self) -> int:
        return self.trace


def export_spans(groups: Iterable[Phase], run: str, endpoint: str) -> int:
    """Send one trace for each group by OTLP over HTTP, and return their number.

    Args:
        groups: spans of groups.
        run: name of the run, an attribute of the resource.
        endpoint: base URL of the collector, for example `http://localhost:4318`.

    Raises:
        SettingsError: the collector refused spans.
    """
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    resource = Resource.create({"service.name": "penstock", "penstock.run": run})
    ids = _SpanIds()
    tracer = TracerProvider(resource=resource, id_generator=ids).get_tracer("penstock")
    count = 0
    try:
        for count, group in enumerate(groups, 1):  # noqa: B007  (counts them)
            ids.trace = int(trace_id(run, str(group.attributes["prompt"])), 16)
            if exporter.export(list(_recorded(tracer, group, Context()))) is not SpanExportResult.SUCCESS:
                raise SettingsError(f"--otlp {endpoint}: the collector did not take the spans of {group.name}")
    finally:
        exporter.shutdown()
    return count


def _recorded(tracer: trace.Tracer, span: Phase, parent: Context) -> Iterator[ReadableSpan]:
    """Yield the SDK's form of what is in a span, and of the span."""
    attributes = {f"penstock.{name}": value for name, value in span.attributes.items()}
    started = tracer.start_span(span.name, parent, attributes=attributes, start_time=_nanoseconds(span.began_at))
    for child in span.children:
        yield from _recorded(tracer, child, trace.set_span_in_context(started, parent))
    started.end(_nanoseconds(span.ended_at))
    if isinstance(started, ReadableSpan):
        yield started


def _nanoseconds(seconds: float) -> int:
    return round(1_000_000_000 * seconds)

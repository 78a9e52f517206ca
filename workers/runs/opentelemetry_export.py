"""Send spans to an OpenTelemetry collector, with the times that were recorded."""

from collections.abc import Iterable

from stream.errors import SettingsError
from workers.runs.phases import Phase, trace_id


def export_spans(groups: Iterable[Phase], run: str, endpoint: str) -> int:
    """Send one trace for each group by OTLP over HTTP, and return their number.

    Args:
        groups: spans of groups.
        run: name of the run, an attribute of the resource.
        endpoint: base URL of the collector, for example `http://localhost:4318`.

    Raises:
        SettingsError: the extra `otel` is not installed, or the collector refused spans.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ModuleNotFoundError as error:
        raise SettingsError(f'--otlp needs {error.name}: pip install "penstock[otel]"') from error
    from workers.runs.recorded_spans import RecordedSpans, SpanIds

    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    resource = Resource.create({"service.name": "penstock", "penstock.run": run})
    ids = SpanIds()
    tracer = TracerProvider(resource=resource, id_generator=ids).get_tracer("penstock")
    count = 0
    try:
        for group in groups:
            ids.trace = int(trace_id(run, str(group.attributes["prompt"])), 16)
            spans = RecordedSpans(tracer).make(group)
            if exporter.export(spans) is not SpanExportResult.SUCCESS:
                raise SettingsError(f"--otlp {endpoint}: the collector did not take the spans of {group.name}")
            count += 1
    finally:
        exporter.shutdown()
    return count

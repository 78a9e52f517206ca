"""Write the trace of a run that runs, has ended, or was killed. Reads its folder only."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stream.durable import write_file_atomically
from stream.errors import PenstockError, SettingsError
from workers.commands.run_files import saved_settings
from workers.commands.trace.spans import Span, Step, group_span
from workers.commands.transcripts.selection import Interval
from workers.run.run_info import find_run
from workers.runs.groups import ArchivedRunGroups
from workers.runs.phases import read_steps
from workers.runs.trace import perfetto_trace

_decoder = msgspec.json.Decoder(dict[str, float])


def write_trace(target: str | None, perfetto: Path | None, otlp: str, steps: str, count: int) -> str:
    """Write or send the newest groups of a run, and say so.

    Args:
        target: folder, settings file or name of the run.
        perfetto: file to write; None: none.
        otlp: base URL of an OpenTelemetry collector; empty: none.
        steps: only groups that these steps ended, `N` or `N..M`; empty: of all steps.
        count: largest number of groups.

    Raises:
        PenstockError: there is no such run, or it has no archived group of these steps.
    """
    location = find_run(target, must_have_begun=False)
    settings, folder = saved_settings(location, "tracing")
    known = read_steps(_metrics(folder / "metrics.jsonl"))
    archived = ArchivedRunGroups(folder)
    wanted = Interval.parse(steps, "--step") if steps else None
    groups = list(_newest(archived, known, wanted, count))
    for problem in archived.damaged[:3]:
        print(f"note: {problem}", file=sys.stderr, flush=True)  # noqa: T201
    if not groups:
        raise PenstockError(
            f"run {settings.run.name!r} has no archived group" + (f" of steps {wanted}" if wanted else " yet")
        )
    done = []
    if perfetto is not None:
        try:
            write_file_atomically(perfetto, msgspec.json.encode(perfetto_trace(groups, known)))
        except OSError as error:
            raise PenstockError(f"{perfetto} could not be written: {error.strerror}") from error
        done.append(f"{perfetto}: {len(groups)} groups; open it at https://ui.perfetto.dev")
    if otlp:
        try:
            from workers.runs.opentelemetry_export import export_spans
        except ModuleNotFoundError as error:
            raise SettingsError(f'--otlp needs {error.name}: pip install "penstock[otel]"') from error
        done.append(f"sent {export_spans(groups, settings.run.name, otlp)} traces to {otlp}")
    return "\n".join(done)


def _newest(archived: ArchivedRunGroups, steps: dict[int, Step], wanted: Interval | None, count: int) -> Iterator[Span]:
    """Yield the spans of the newest groups, each group once."""
    last = None
    for found in archived.completions(wanted, newest_first=True):
        if found.group is last:
            continue
        if not count:
            return
        last = found.group
        span = group_span(found.group, found.outcome, steps.get(found.step or 0))
        if span is not None:
            count -= 1
            yield span


def _metrics(path: Path) -> Iterator[dict[str, float]]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield _decoder.decode(line)
        except ValueError:  # the last line of a trainer that was killed
            continue

"""Findings of the preflight, and the report that holds all of them."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct, field

from stream.causes import ErrorCause

Level = Literal["error", "warning"]


class Finding(Struct, frozen=True, kw_only=True):
    """One fault: what is wrong, where, and the remedy."""

    level: Level
    subject: str
    """What is wrong: `model`, `reward exact`, `environment counter`."""
    place: str
    """A key of the settings, or file and line in the user's code."""
    problem: str
    """What is wrong with it, and the remedy."""
    cause: ErrorCause | None = None
    """The exception, if user code raised one."""


class PreflightReport(Struct, kw_only=True):
    """Result of the preflight."""

    findings: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    """What was checked, in words."""
    seconds: float = 0.0

    @property
    def errors(self) -> list[Finding]:
        """Faults with which the run cannot work."""
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """Faults with which the run works, but probably not as meant."""
        return [finding for finding in self.findings if finding.level == "warning"]

    def error(self, subject: str, place: str, problem: object, cause: ErrorCause | None = None) -> None:
        """Add a fault with which the run cannot work."""
        self._add("error", subject, place, problem, cause)

    def warn(self, subject: str, place: str, problem: object, cause: ErrorCause | None = None) -> None:
        """Add a fault with which the run works, but probably not as meant."""
        self._add("warning", subject, place, problem, cause)

    def extend(self, findings: Iterable[Finding]) -> None:
        """Add findings that are not there yet."""
        self.findings += [each for each in findings if each not in self.findings]

    def _add(self, level: Level, subject: str, place: str, problem: object, cause: ErrorCause | None) -> None:
        if cause is not None and cause.file:
            place = f"{place}, {cause.place}"
        finding = Finding(level=level, subject=subject, place=place, problem=str(problem), cause=cause)
        self.extend([finding])


def render_findings(report: PreflightReport) -> str:
    """Return the findings for a terminal: errors first, each with its traceback, if it has one."""
    blocks = [_render(finding) for finding in (*report.errors, *report.warnings)]
    return "\n".join([*blocks, *([_verdict(report)] if blocks else [])])


def _render(finding: Finding) -> str:
    lines = [f"{finding.level}: {finding.subject} ({finding.place}): {finding.problem}"]
    if finding.level == "error" and finding.cause is not None and finding.cause.traceback:
        lines += [f"    {line}" for line in finding.cause.traceback.splitlines()]
    return "\n".join(lines)


def _verdict(report: PreflightReport) -> str:
    counts = [_count(report.errors, "error"), _count(report.warnings, "warning")]
    found = " and ".join(filter(None, counts))
    if report.errors:
        return f"{found} found in {report.seconds:.1f} s, before anything was started"
    return f"{found} found in {report.seconds:.1f} s"


def _count(findings: list[Finding], word: str) -> str:
    return f"{len(findings)} {word}{'' if len(findings) == 1 else 's'}" if findings else ""

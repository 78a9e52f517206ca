"""What `check` found out, in the form in which tests compare it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from workers.check.check import check
from workers.check.report import CheckReport, EnvironmentTrial


class Tried(Struct):
    """A reference that was tried alone."""

    report: CheckReport
    errors: list[str]
    warnings: list[str]
    trial: EnvironmentTrial | None
    """None if it is no environment, or none could be made."""


def tried(ref: str, fields: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> Tried:
    """Try a reference alone; errors and warnings are messages with their remedies."""
    report = check(ref, fields=fields, **options)
    return Tried(report, texts(report, "error"), texts(report, "warning"), report.environments.get(ref))


def texts(report: CheckReport, *levels: str) -> Sequence[str]:
    """Return the findings of these levels as `PLACE: MESSAGE; REMEDY`, without an empty place."""
    found = [finding for finding in report.findings if finding.level in levels]
    return [f"{each.place}: {each.text}" if each.place else each.text for each in found]

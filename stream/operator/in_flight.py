"""The groups that workers hold, and what each completion of them is doing."""

import msgspec

from stream.operator.run_status import RunStatus
from stream.queue.in_flight import GroupInFlight

_DECODER = msgspec.json.Decoder(list[GroupInFlight])


def groups_in_flight(status: RunStatus) -> list[GroupInFlight]:
    """Return the groups of a status that was read with its workers' reports, the longest unchanged first.

    A group whose lease has ended since its worker's last report is left out; so is a report that cannot be read.
    """
    leases = {stage: frozenset(ids.split()) for stage, ids in status.leases.items()}
    found: dict[tuple[str, str], GroupInFlight] = {}
    for report in status.in_flight:
        try:
            groups = _DECODER.decode(report.groups)
        except msgspec.DecodeError:
            continue
        for group in groups:
            if group.entry in leases.get(report.stage, ()):
                group.stage, group.worker = report.stage, report.worker
                found[report.stage, group.entry] = group
    return sorted(found.values(), key=lambda group: (group.unchanged_since, group.prompt))

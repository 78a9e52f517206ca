"""Run a conformance file through the project's public functions.

    python tests/conformance/run.py FILE [--verbose]

Prints a line per family, `family: passed/failed`, and a total; for each failed case its id, the field and the largest
deviation. Exits with 1 if a case failed, with 2 if the file cannot be run. The other modules of this folder translate
the file's names into the project's functions and options; nothing here computes results.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

# The families register themselves.
from tests.conformance import (
    families_advantages,  # noqa: F401
    families_areal,  # noqa: F401
    families_correction,  # noqa: F401
    families_field,  # noqa: F401
    families_losses,  # noqa: F401
)
from tests.conformance.cases import Case, Difference, UnreadableError, cases_of, families_of, read, run

WIDTH = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the file and print what came out; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print expected and got of what failed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        file = read(options.file)
    except UnreadableError as error:
        print(error, file=sys.stderr)
        return 2
    passed = failed = 0
    for family in families_of(file):
        outcomes = [(case, run(case)) for case in cases_of(file, family)]
        failures = [(case, differences) for case, differences in outcomes if differences]
        print(_line(family, len(outcomes) - len(failures), len(failures)))
        for case, differences in failures:
            _explain(case, differences, verbose=options.verbose)
        passed += len(outcomes) - len(failures)
        failed += len(failures)
    print(_line("total", passed, failed))
    return 1 if failed else 0


def _line(name: str, passed: int, failed: int) -> str:
    return f"{name + ':':<{WIDTH}} {passed:>4}/{failed}"


def _explain(case: Case, differences: Sequence[Difference], *, verbose: bool) -> None:
    for difference in differences:
        print(f"    {case.id}: {difference.field}: {difference.reason}")
        if verbose and difference.expected is not None:
            print(f"        expected {difference.expected}\n        got      {difference.got}")


if __name__ == "__main__":
    sys.exit(main())

"""The conformance suite for providers of sandboxes: `python -m envs.sandboxes.conformance PROVIDER [--image IMAGE]`.

PROVIDER is an entry point of the group `penstock.sandboxes`, or `module:Class`. Each of the `conformance_cases` makes
sandboxes of its own and removes them. One line for each says how it ended: `ok`, `skipped` with the trait that the
provider lacks, or `FAILED` with what the contract demands and what was seen. The exit code is 1 if a case fails.

An image needs `sh`, `cat`, `echo`, `head`, `kill`, `ln`, `mkfifo`, `sleep` and `tr`, as busybox has them.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Final

import anyio
from anyio import to_thread

from envs.sandboxes.conformance_bench import (
    CaseSkipped,
    ConformanceError,
    conformance_spec,
    load_provider,
    open_bench,
)
from envs.sandboxes.conformance_cases import CASES
from envs.sandboxes.contract import BEGUN_LABEL, RUN_LABEL, ProviderOptions

_DEFAULTS: Final = ProviderOptions()


async def run_case(reference: str, case: str, options: ProviderOptions = _DEFAULTS, image: str = "") -> None:
    """Run one case.

    Raises:
        ConformanceError: the contract is not met.
        CaseSkipped: the provider lacks the trait.
    """
    async with open_bench(reference, options, image) as bench:
        await CASES[case](bench)


async def _run_all(reference: str, options: ProviderOptions, image: str, cases: Sequence[str]) -> int:
    failed = 0
    for name in cases:
        begun, said = time.monotonic(), "ok"
        try:
            await run_case(reference, name, options, image)
        except CaseSkipped as skipped:
            said = f"skipped: {skipped}"
        except Exception as error:  # noqa: BLE001  (whatever a provider raises)
            failed += 1
            said = f"FAILED: {error if isinstance(error, ConformanceError) else repr(error)}"
        sys.stdout.write(f"{name:<14} {time.monotonic() - begun:6.1f} s  {said}\n")
        sys.stdout.flush()
    return int(failed > 0)


async def _create(reference: str, options: ProviderOptions, image: str, name: str, run_id: str) -> int:
    found = await to_thread.run_sync(load_provider, reference)
    async with found(options) as provider:
        sys.stdout.write("creating\n")
        sys.stdout.flush()
        labels = {RUN_LABEL: run_id, BEGUN_LABEL: f"{time.time():.3f}"}
        await provider.create(name, conformance_spec(image), labels)
        await anyio.sleep(60)
    return 0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m envs.sandboxes.conformance", description="Test a provider of sandboxes against the contract."
    )
    parser.add_argument("provider", help="an entry point of penstock.sandboxes, or module:Class")
    parser.add_argument("--image", default="", help="for providers with images")
    parser.add_argument("--address", default="", help="as sandboxes.address")
    parser.add_argument("--runtime", default="", help="as sandboxes.runtime")
    parser.add_argument("--case", action="append", choices=CASES, help="this one alone; may be repeated")
    parser.add_argument("--create", default="", help=argparse.SUPPRESS)
    parser.add_argument("--run-id", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = ProviderOptions(address=given.address, runtime=given.runtime)
    if given.create:
        return anyio.run(_create, given.provider, options, given.image, given.create, given.run_id)
    return anyio.run(_run_all, given.provider, options, given.image, given.case or list(CASES))


if __name__ == "__main__":
    sys.exit(main())

"""Run the tests on the newest versions that pyproject.toml permits, and name the package with which they fail.

    python tests/newest.py                 # what `make test` runs (`make test-newest`; part of the nightly run)
    python tests/newest.py tests/unit      # some of it: more arguments are pytest's

Makes `.cache/newest`, a virtual environment without the lock. If tests fail there, it sets half of the packages that
differ back to their locked versions, runs the failed tests again, and goes on with the half that matters.
"""

import json
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".cache" / "newest"
PYTHON = HOME / "bin" / "python"
_SHORT = "not full and not gpu and not vllm and not agents and not compose and not sandboxes"
_LIMIT_S = 3600.0


def find_culprit(packages: Sequence[str], passes_without: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return the smallest part of `packages`, found by halving, whose old versions let the tests pass.

    Args:
        packages: their newest versions together make tests fail.
        passes_without: whether the tests pass with the locked versions of these packages.

    Returns:
        One package, or more if only together they let the tests pass.
    """
    if len(packages) < 2:
        return list(packages)
    middle = len(packages) // 2
    for half in (packages[:middle], packages[middle:]):
        if passes_without(half):
            return find_culprit(half, passes_without)
    return list(packages)


def main(arguments: Sequence[str]) -> int:
    """Run the tests; returns 0 if they pass."""
    venv.create(HOME, with_pip=True, clear=True)
    _pip("--upgrade", "pip")
    version = re.search(r'"(torch==[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert version is not None
    _pip(version[1])
    _pip("--editable", f"{ROOT}[dev]")
    newest, locked = _installed(), _locked()
    changed = sorted(name for name in newest.keys() & locked.keys() if newest[name] not in locked[name])
    print("newer than locked:", ", ".join(f"{name} {newest[name]}" for name in changed) or "nothing", flush=True)
    if not (failed := _failed_tests(["-m", _SHORT, "-n", "4", "--dist", "worksteal", *arguments])):
        print("all tests pass with the newest versions")
        return 0

    def passes_without(packages: Sequence[str]) -> bool:
        _install(packages, {name: locked[name][0] for name in packages})
        try:
            return not _failed_tests(failed)
        finally:
            _install(packages, newest)

    if not changed or not passes_without(changed):
        print(f"{len(failed)} tests fail with the locked versions, too: no newer package is the cause")
    else:
        for name in find_culprit(changed, passes_without):
            print(f"{len(failed)} tests fail with {name} {newest[name]}; locked: {locked[name][0]}")
    return 1


def _pip(*arguments: str) -> None:
    subprocess.run([PYTHON, "-m", "pip", "install", "-qq", *arguments], check=True, timeout=_LIMIT_S)


def _install(packages: Sequence[str], versions: Mapping[str, str]) -> None:
    _pip("--no-deps", *(f"{name}=={versions[name]}" for name in packages))


def _installed() -> dict[str, str]:
    command = [PYTHON, "-m", "pip", "list", "--format", "json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S).stdout)
    return {re.sub(r"[-_.]+", "-", row["name"]).lower(): row["version"] for row in rows}


def _locked() -> dict[str, list[str]]:
    """Return the locked versions of each package; several if the newest does not run everywhere."""
    result: dict[str, list[str]] = {}
    for name, version in re.findall(
        r"^([\w.-]+)==([^\s;]+)", (ROOT / "requirements" / "all.lock").read_text(), re.MULTILINE
    ):
        result.setdefault(name, []).append(version)
    return result


def _failed_tests(arguments: Sequence[str]) -> list[str]:
    """Run pytest with these arguments; returns the tests that failed, or what stopped it."""
    command = [PYTHON, "-m", "pytest", "-rfE", *arguments]
    failed = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if result := re.match(r"(?:FAILED|ERROR) (.+?)(?: - |$)", line.rstrip()):
                failed.append(result[1])
    return failed or (["tests"] if process.returncode else [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

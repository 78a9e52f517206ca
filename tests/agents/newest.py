"""Run the tests of agent programs on their newest versions, and name each program with which one fails.

    python tests/agents/newest.py          # part of the nightly run; needs npm, and 2 GB

Installs the newest programs and SDKs into `.cache/agents-newest`. What fails there is run again on the locked versions
(`setup.sh`): a program is named if its tests pass with those. So a vendor's change is seen as a red night.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NEWEST, LOCKED = ROOT / ".cache" / "agents-newest", ROOT / ".cache" / "agents"
FOLDER_VARIABLE = "PENSTOCK_TEST_AGENTS"
"""Names the folder of the programs for the tests."""
PACKAGES = {
    "claude-code": "@anthropic-ai/claude-code",
    "codex": "@openai/codex",
    "opencode": "opencode-ai",
    "mini-swe-agent": "mini-swe-agent",
    "agents-sdk": "openai-agents",
    "langgraph": "langgraph",
}
"""Package of each program, by its name in the ids of tests."""
_LIMIT_S = 3600.0


def program_of(test: str) -> str:
    """Return the program that a test starts, by its id; empty if the id names none."""
    name = test.partition("[")[2].replace("_", "-")
    return next((program for program in PACKAGES if program in name), "")


def verdict(failed: Iterable[str], failed_locked: Iterable[str], versions: Mapping[str, str]) -> list[str]:
    """Return a line for each program with which tests fail.

    Args:
        failed: ids of tests that fail with the newest versions.
        failed_locked: those of them that fail with the locked ones, too.
        versions: newest and locked version of each program, as one text.
    """
    broken: dict[str, list[str]] = {}
    for test in sorted(set(failed) - set(failed_locked)):
        broken.setdefault(program_of(test), []).append(test)
    lines = [
        f"{program or 'no program'} {versions.get(program, '')}: {', '.join(tests)}"
        for program, tests in sorted(broken.items())
    ]
    return lines + [f"fails with the locked versions, too: {test}" for test in sorted(set(failed_locked))]


def install() -> None:
    """Install the newest versions."""
    shutil.rmtree(NEWEST, ignore_errors=True)
    NEWEST.mkdir(parents=True)
    names = list(json.loads((HERE / "package.json").read_text())["dependencies"])
    _run(["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error", *(f"{name}@latest" for name in names)])
    venv.create(NEWEST / "venv", with_pip=True)
    wanted = re.findall(r"^([A-Za-z][\w.-]*)", (HERE / "requirements.in").read_text(), re.MULTILINE)
    _run([str(NEWEST / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet", *wanted])
    (NEWEST / "ready-newest").touch()


def installed(folder: Path, name: str) -> str:
    """Return the installed version of a package of npm or Python; empty if it is not there."""
    manifest = folder / "node_modules" / name / "package.json"
    if manifest.is_file():
        return str(json.loads(manifest.read_text())["version"])
    spelled = name.replace("-", "_")
    found = sorted((folder / "venv").glob(f"lib/*/site-packages/{spelled}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else ""


def failed_tests(folder: Path, arguments: Iterable[str]) -> list[str]:
    """Run pytest with the programs of a folder; returns the tests that fail, or what stopped it."""
    command = [sys.executable, "-m", "pytest", "-m", "agents", "-rfE", "-n", "2", *arguments]
    environment = {**os.environ, "CI": "true", FOLDER_VARIABLE: str(folder)}
    failed = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if result := re.match(r"(?:FAILED|ERROR) (.+?)(?: - |$)", line.rstrip()):
                failed.append(result[1])
    return failed or (["tests/agents"] if process.returncode else [])


def main() -> int:
    """Run the tests; returns 0 if they pass with the newest versions."""
    if shutil.which("npm") is None:
        print("NOT TESTED: npm is missing, so no agent program can be installed; install Node.js 20 or newer")
        return 1 if os.environ.get("CI") else 0
    install()
    failed = failed_tests(NEWEST, ["tests/agents"])
    again: list[str] = []
    if failed:
        environment = {**os.environ, "PYTHON": sys.executable}
        subprocess.run(["sh", str(HERE / "setup.sh")], check=True, env=environment, timeout=_LIMIT_S)
        again = failed_tests(LOCKED, failed)
    versions = {}
    for program, package in PACKAGES.items():
        versions[program] = f"{installed(NEWEST, package)} (locked: {installed(LOCKED, package) or 'not installed'})"
        print(f"{program} {versions[program]}")
    for line in verdict(failed, again, versions):
        print(line)
    return 1 if failed else 0


def _run(command: list[str]) -> None:
    subprocess.run(command, cwd=NEWEST, check=True, timeout=_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())

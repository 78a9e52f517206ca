"""Folders of tasks in Harbor's format."""

from pathlib import Path

TEST = "#!/bin/sh\ntest -f /work/done && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
SOLVE = "#!/bin/sh\ntouch /work/done\n"


def write_files(folder: Path, files: dict[str, str]) -> Path:
    """Write files by their paths in a folder; scripts may be executed."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.endswith(".sh"):
            path.chmod(0o755)
    return folder


def write_task(folder: Path, settings: str = "", image: str = "busybox", **files: str) -> Path:
    """Write a task of one step that needs `/work/done`; `files` are further files, `__` for a slash."""
    environment = f'[environment]\ndocker_image = "{image}"\n' if image and "[environment]" not in settings else ""
    defaults = {
        "task.toml": f'schema_version = "1.4"\n{settings}\n{environment}',
        "instruction.md": "Make the file /work/done.\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": SOLVE,
    }
    return write_files(folder, defaults | {name.replace("__", "/"): text for name, text in files.items()})


def write_steps(folder: Path, settings: str, names: tuple[str, ...]) -> Path:
    """Write a task of several steps, each with its own tests."""
    files = {"task.toml": settings}
    for name in names:
        files |= {
            f"steps/{name}/instruction.md": f"Do {name}.\n",
            f"steps/{name}/tests/test.sh": TEST,
            f"steps/{name}/solution/solve.sh": SOLVE,
        }
    return write_files(folder, files)

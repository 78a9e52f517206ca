"""A process that resolves names on a hub, since the libraries read their environment once, when they are imported.

As a program it reads one JSON object a line, resolves the names of its settings, and answers with one JSON object.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class HubClient:
    """The process, with the environment of a user."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cases.hub_client", str(folder)],
            cwd=ROOT, env=kept | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, table: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Resolve the names of these settings; `options` are parameters of `_answer`."""
        self.begin(table, **options)
        return json.loads(self.process.stdout.readline())

    def begin(self, table: dict[str, Any], **options: Any) -> None:
        """Send a request and do not wait for the answer."""
        self.process.stdin.write(json.dumps({"table": table} | options) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def _answer(
    table: dict[str, Any],
    known: dict[str, str] | None = None,
    offline: bool = False,
    free: int | None = None,
    token: str = "",
    answer_within_s: float = 30.0,
) -> dict[str, Any]:
    """Resolve the names of settings.

    Args:
        table: the settings.
        known: what the run's identity keeps.
        offline: as if HF_HUB_OFFLINE were set.
        free: bytes that every disk seems to have free.
        token: HF_TOKEN.
        answer_within_s: how long a request waits for an answer.
    """
    from huggingface_hub import constants

    from stream.errors import PenstockError
    from workers.datasets.mix import open_dataset_mix
    from workers.hub import downloads, libraries
    from workers.hub.names import recorded_revisions, resolve_names
    from workers.settings.toml_file import dump_settings, parse_settings

    constants.HF_HUB_OFFLINE = offline
    constants.DOWNLOAD_CHUNK_SIZE = 50_000  # a download is continued at whole pieces, which are large
    libraries.ANSWER_WITHIN_S = answer_within_s
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    measure, said = downloads.free_bytes, []
    if free is not None:
        downloads.free_bytes = lambda _: free
    try:
        settings = resolve_names(parse_settings(table), known or {}, said.append)
        rows = []
        if settings.data.path:
            prompts, _ = open_dataset_mix(settings).read_prompts(0, 3)
            rows = [prompt.messages[-1]["content"] for prompt in prompts]
    except PenstockError as error:
        return {"error": str(error), "kind": type(error).__name__, "said": said}
    finally:
        downloads.free_bytes = measure
    found = {"recorded": recorded_revisions(settings), "folder": str(settings.model.folder), "rows": rows, "said": said}
    return found | {"error": "", "toml": dump_settings(settings)}


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(seconds, 0.02))  # the libraries wait seconds between two attempts
    for line in sys.stdin:
        print(json.dumps(_answer(**json.loads(line))), flush=True)

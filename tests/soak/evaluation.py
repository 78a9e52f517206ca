"""Runs with evaluation, whose engine's answers depend only on prompt, completion and turn.

The learner is a witness and its weights reach no answer, so no sample depends on the training. Two environments play
with the demo's tokenizer and calculator: most first turns call it, every other turn is an answer.
"""

import json
import zlib
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from stream.connection.run_connection import RunConnection
from stream.operator.status import RunStatus
from tests.base_models.demo_model import make_tokenizer
from tests.scripted_engine.state import DelayFunction, ReplyFunction
from tests.soak.project import ENDS, ENGINE_PROGRAM, write_project
from tests.soak.run import log_ends, status_of, supervise
from workers.engine_api.wire import GenerateRequest
from workers.launch.supervisor import RunOutcome
from workers.settings import Settings

HELD_OUT_FROM = 1000
"""No other prompt has a number of four digits."""


def describe(folder: Path, *, groups: int, held_out: int, evaluate: bool = True, **sections: Any) -> Settings:
    """Write model and prompts; returns the settings of a run on them, with `sections` added to the table."""
    table: dict[str, Any] = {
        "data": {"chat_template_kwargs": {"tools": False}},
        "environments": {"sums": "calculator", "others": "calculator"},
        "rewards": [{"ref": f"{ENDS}:by_chance"}],
        "rollout": {"group_size": 3, "max_tokens": 200, "max_tokens_per_turn": 80},
        "train": {"batch_size": 4, "save_every": 2},
        "pacing": {"max_staleness": 0},
        "queue": {"max_attempts": 100},
        "abort": {"max_invalid_fraction": 1.0, "stall_timeout_s": 80.0},
    }
    if evaluate:
        table["eval"] = {"path": str(folder / "held_out.jsonl"), "every": 2, "group_size": 4}
    for name, section in sections.items():
        table[name] = table.get(name, {}) | section
    if not (folder / "model").exists():
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(folder / "model")
        config = {"eos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
        (folder / "model" / "config.json").write_text(json.dumps(config))
    settings = write_project(folder, 0, **table)
    _write_prompts(folder / "prompts.jsonl", 0, groups)
    _write_prompts(folder / "held_out.jsonl", HELD_OUT_FROM, held_out)
    return settings


def _write_prompts(path: Path, first: int, count: int) -> None:
    with path.open("w") as file:
        for number in range(first, first + count):
            row = {"prompt": f"Say {number}.", "number": number, "environment": ("sums", "others")[number % 2]}
            file.write(json.dumps(row) + "\n")


def scripted(model: Path) -> ReplyFunction:
    """Return the engine's reply function: it calls `add(A, B)`, or answers with a digit."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    called = tokenizer.token_to_id("<tool_call>")
    assert called is not None

    def reply(prompt_ids: list[int], request: GenerateRequest) -> list[int]:
        seed = request.sampling_params.seed
        assert seed is not None, "the request has no seed"
        drawn = zlib.crc32(array("q", [*prompt_ids, seed]).tobytes())
        if drawn % 3 and called not in prompt_ids:
            call = f'{{"name": "add", "arguments": {{"a": {drawn % 50}, "b": {drawn % 7}}}}}'
            text = f"<tool_call>{call}</tool_call><|im_end|>"
        else:
            text = f"Answer: {drawn % 5}<|im_end|>"
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return reply


def delay_of_held_out(model: Path, seconds: float) -> DelayFunction:
    """Return the engine's delays: `seconds` for a held-out prompt."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ask = "<|im_start|>user\nSay 1"
    starts = [tokenizer.encode(f"{ask}{rest:03d}", add_special_tokens=False).ids for rest in range(100)]
    return lambda request: seconds * any(request.token_ids[: len(start)] == start for start in starts)


@dataclass
class Watched:
    """A run and its statuses over time."""

    outcome: RunOutcome | None = None
    looks: list[RunStatus] = field(default_factory=list)


def run(
    settings: Settings,
    *options: str,
    meddle: Callable[[RunStatus, RunConnection], Awaitable[None]] | None = None,
    limit_s: float = 100.0,
    **programs: tuple[str, ...],
) -> Watched:
    """Supervise the run to its end, and read its status after every event.

    Args:
        settings: settings of the run.
        options: options of the engine.
        meddle: called with each status and the connection; may kill processes.
        limit_s: seconds after which the run is abandoned; the outcome is None then.
        programs: as in `supervise`.
    """
    watched = Watched()

    async def watch(connection: RunConnection) -> None:
        after = "0-0"
        while True:
            after = await connection.wait_for_change(after, 0.2)
            if (status := await status_of(connection)) is None:
                continue
            watched.looks.append(status)
            if meddle is not None:
                await meddle(status, connection)

    engine = (ENGINE_PROGRAM, "--evaluated", settings.model.path, *options)
    watched.outcome = supervise(settings, watch, limit_s=limit_s, engine=engine, **programs)
    return watched


def ended(settings: Settings, watched: Watched) -> RunStatus:
    """Assert that the run finished with nothing left over; returns the last status."""
    log = log_ends(settings.folder)
    assert watched.outcome is not None, f"the run did not come to its end in time\n{log}"
    assert watched.outcome.failure is None, log
    status = watched.outcome.status
    assert status is not None
    assert (status.unfinished, status.outstanding) == (0, 0)
    return status


def ledger(settings: Settings) -> list[dict[str, Any]]:
    """Return the ledger's records, sorted by step and prompt."""
    lines = [json.loads(line) for line in (settings.folder / "ledger.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["step"], line["prompt"]))

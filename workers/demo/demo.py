"""`penstock demo`: a small model learns to use a calculator through the whole pipeline, offline and within minutes.

::

    prepare      writes the shipped base model, which has bad habits, problems, run.toml
    score        samples 200 held-out problems with the run's episode loop and reward
    run          starts every role as a process, exactly like `penstock run FOLDER/run.toml`
    score        samples the same problems again
    report       prints tables and conversations; writes summary.json and progress.png

Rewards of negative controls: demo runs that must not learn, as evidence that the real run does.
"""

import math
import random
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from envs.builtin.calculator import exact_answer
from stream.durable import write_file_atomically
from stream.errors import RunFailedError
from stream.validity import Reward
from workers.demo.prepare import STEPS, NegativeControl, demo_settings, prepare_run
from workers.demo.scores import DemoScore, conversations, score_policy, score_table
from workers.demo.task import held_out_rows
from workers.evaluate.temporary_engine import with_started_engine
from workers.launch.process import run_async
from workers.launch.start import raise_for_failure, supervise
from workers.role import log_setup as logs
from workers.runs.summary import RunSummary
from workers.settings import Settings
from workers.train.checkpointing.checkpoint import CheckpointStore

HELD_OUT_PROBLEMS = 200


def run_demo(
    seed: int,
    folder: Path,
    *,
    as_json: bool = False,
    control: NegativeControl | None = None,
    steps: int | None = None,
    vllm_python: str = "",
) -> int:
    """Run or resume the demo; returns the exit code.

    Args:
        seed: seed of problems, sampling and run; the model is the same for every seed.
        folder: the run's folder.
        as_json: print the summary as one JSON line, the only output on stdout.
        control: `zero-lr` trains with learning rate 0; `permuted` permutes rewards within each group.
        steps: optimizer steps that the prompts suffice for; None: 32. Dropped groups reduce the number.
        vllm_python: interpreter with vLLM, to sample with vLLM; empty: the local engine.

    Raises:
        RunFailedError: the run failed.
    """
    console = Console(stderr=True, highlight=False)
    settings = prepare_run(folder, seed, steps or STEPS, control, vllm_python)
    scoring = demo_settings(folder, seed, vllm_python=vllm_python)  # a control run is scored with the real reward
    rows = held_out_rows(HELD_OUT_PROBLEMS)
    model = Path(settings.model.path)
    before = _score_with_status(scoring, model, rows, console, "before")
    ended = supervise(settings)
    raise_for_failure(ended, settings)
    summary = ended.summary
    if summary is None or ended.outcome.interrupted:
        console.print(f"stopped; `penstock run {folder / 'run.toml'}` resumes")
        return 0
    checkpoint = CheckpointStore(settings.folder / "checkpoints").latest()
    if checkpoint is None:
        raise RunFailedError(f"{settings.folder / 'checkpoints'} holds no checkpoint, although the run ended")
    after = _score_with_status(scoring, checkpoint.model, rows, console, "after")
    summary.score_before, summary.score_after = round(before.sampled, 4), round(after.sampled, 4)
    write_file_atomically(folder / "summary.json", msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    _report(console, folder, rows, before, after, summary)
    if as_json:
        print(msgspec.json.encode(summary).decode(), flush=True)  # noqa: T201  (this is the command's output)
    return 0


def prepare_demo(seed: int, folder: Path, steps: int | None = None, vllm_python: str = "") -> int:
    """Prepare the folder for roles that are started one by one; returns the exit code."""
    console = Console(stderr=True, highlight=False)
    prepare_run(folder, seed, steps or STEPS, vllm_python=vllm_python)
    console.print(f"ready: {folder / 'run.toml'}", soft_wrap=True)
    return 0


def _score_with_status(
    settings: Settings, model: Path, rows: list[dict[str, Any]], console: Console, when: str
) -> DemoScore:
    """Start an engine with the model, and score the model on `rows`."""
    (settings.folder / "logs").mkdir(exist_ok=True)
    what = f"score {when}: {len(rows)} held-out problems"
    status = console.status(what) if console.is_terminal else nullcontext()
    if not console.is_terminal:
        console.print(what)
    with logs.log_to_file("demo", settings.folder / "logs" / "demo.log"), status:
        score = run_async(lambda: _score(settings, model, rows))
    if score.unmeasured or not math.isfinite(score.sampled):
        console.print(f"score {when}: {score.unmeasured} episodes could not be measured; they are left out")
    return score


async def _score(settings: Settings, model: Path, rows: list[dict[str, Any]]) -> DemoScore:
    async def use(url: str, _version: int) -> DemoScore:
        return await score_policy(settings, url, model, rows)

    return await with_started_engine(settings, model, use, settings.folder / "logs")


def _report(
    console: Console, folder: Path, rows: list[dict[str, Any]], before: DemoScore, after: DemoScore, summary: RunSummary
) -> None:
    for row, one, other in zip(rows, before.samples, after.samples, strict=False):
        console.print(conversations(row, one, other))
    console.print(score_table(before, after, summary))
    console.print(f"[dim]plot[/]    {folder / 'progress.png'}\n[dim]summary[/] {folder / 'summary.json'}")
    console.print(f"[dim]policy[/]  penstock export {folder} my-policy", soft_wrap=True)


def permuted_answer(
    prompts: list[Any], completions: list[Any], environments: list[Any], answer: list[Any]
) -> list[float | Reward]:
    """Return the demo's rewards, permuted within the group; the group's content determines the permutation."""
    rewards = list(exact_answer(completions=completions, environments=environments, answer=answer))
    random.Random(zlib.crc32(repr((prompts[0], completions)).encode())).shuffle(rewards)
    return rewards

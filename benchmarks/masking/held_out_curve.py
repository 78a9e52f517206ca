"""The demo's held-out score during a run with rewards that fail at random: failures masked, or scored 0.0.

    python -m benchmarks.masking.held_out_curve            run what is missing in held_out_curve.json, then draw
    python -m benchmarks.masking.held_out_curve --replot   only draw and print the figures

Each seed has one warm start and one prompt file, from which each arm runs like `penstock demo`, with the demo's
settings. A fifth of the rewards fail, for the same (prompt, completion index) in each arm (`failing.py`). The measure
is the true score of policies along the run on 200 held-out problems, so a checkpoint of every step is kept, 3 GB in
all. Fifteen demos of about four minutes; an interrupted command continues where it stopped.
"""

import argparse
import functools
import itertools
from pathlib import Path
from typing import Any

import anyio
import msgspec

from benchmarks.masking.curve_figure import draw, wanted
from stream.errors import RunFailedError
from workers.datasets.row_mapping import row_to_prompt
from workers.demo.demo import HELD_OUT_PROBLEMS
from workers.demo.prepare import demo_settings, prepare_run
from workers.demo.scores import score_policy
from workers.demo.task import held_out_rows
from workers.engine_api.discovery import EngineDiscovery
from workers.launch.children import ChildProcess
from workers.launch.process import run_async
from workers.launch.specs import engine_spec
from workers.launch.start import raise_for_failure, supervise
from workers.role import log_setup as logs
from workers.runs.metrics_file import read_metrics
from workers.settings import RewardSettings, Settings
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.publishing.publisher import open_publisher

HERE = Path(__file__).parent
RESULTS = HERE / "held_out_curve.json"
ARMS = {"masked": "raising", "scored zero": "scoring_zero", "no failures": ""}
"""Name of the arm -> its reward in `failing.py`; the last one is the demo as it is."""
Run = dict[str, Any]
"""One demo, as it stands in the results: numbers alone, so that figures can be drawn again without it."""


def train(seed: int, arm: str, folder: Path) -> Run:
    """Run one demo."""
    start = folder / f"seed-{seed}"
    prepare_run(start, seed)
    settings = settings_of(seed, arm, start)
    ended = supervise(settings, quiet=True)
    raise_for_failure(ended, settings)
    if ended.outcome.interrupted or ended.summary is None:
        raise SystemExit("stopped; the same command goes on")
    summary = ended.summary
    return {
        "seed": seed,
        "arm": arm,
        "steps": steps_of(settings),
        "fed": summary.fed,
        "groups_trained": summary.groups_trained,
        "groups_dropped": summary.groups_dropped,
        "completions": summary.completion_states,
        "scores": {},
    }


def steps_of(settings: Settings) -> list[dict[str, float]]:
    """Return for each step the number of finished prompts and the run's own mean reward."""
    ledger = (settings.folder / "ledger.jsonl").read_bytes()
    rewards = {row["step"]: row.get("reward/mean") for row in read_metrics(settings.folder / "metrics.jsonl")}
    progress = [checkpoint.progress for checkpoint in CheckpointStore(settings.folder / "checkpoints").list_all()]
    return [
        {"step": p.step, "ended": ledger[: p.ledger_bytes].count(b"\n"), "reward": rewards[p.step]} for p in progress
    ]


def settings_of(seed: int, arm: str, start: Path) -> Settings:
    """Return the demo's settings with the arm's reward, keeping every checkpoint."""
    demo = demo_settings(start.with_name(f"seed-{seed}-{arm.replace(' ', '-')}"), seed)
    replace = msgspec.structs.replace
    settings = replace(
        demo,
        model=replace(demo.model, path=str(start / "model")),
        data=replace(demo.data, path=str(start / "numbered" / "prompts.jsonl")),
        train=replace(demo.train, save_every=1, max_checkpoints=1000),
        abort=replace(demo.abort, max_invalid_fraction=0.5),
    )
    _number(start / "prompts.jsonl", settings)
    if not ARMS[arm]:
        return settings
    failing = HERE / "failing.py"
    return replace(
        settings,
        environments={"calculator": f"{failing}:NumberedCalculator"},
        rewards=(RewardSettings(ref=f"{failing}:{ARMS[arm]}"),),
    )


def _number(source: Path, settings: Settings) -> None:
    """Write the demo's prompts with the columns that the failing rewards need."""
    target = Path(settings.data.path)
    target.parent.mkdir(exist_ok=True)
    rows = [msgspec.json.decode(line) for line in source.read_bytes().splitlines()]
    for number, row in enumerate(rows):
        row |= {"run_seed": settings.run.seed, "prompt_id": row_to_prompt(row, number, 0, settings=settings).id}
    target.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def measure(known: Run, folder: Path) -> None:
    """Add missing scores that the curves need."""
    start = folder / f"seed-{known['seed']}"
    checkpoints = CheckpointStore(settings_of(known["seed"], known["arm"], start).folder / "checkpoints")
    models = {0: start / "model"} | {
        checkpoint.progress.step: checkpoint.model for checkpoint in checkpoints.list_all()
    }
    missing = [step for step in wanted(known) if str(step) not in known["scores"]]
    if missing:
        known["scores"] |= run_async(lambda: play(demo_settings(start, known["seed"]), {s: models[s] for s in missing}))


async def play(scoring: Settings, models: dict[int, Path]) -> dict[str, list[float]]:
    """Return the true score of each policy by step, sampled and greedy, on a separate engine."""
    scores: dict[str, list[float]] = {}
    rows = held_out_rows(HELD_OUT_PROBLEMS)
    (scoring.folder / "logs").mkdir(exist_ok=True)
    async with anyio.create_task_group() as tasks:
        child = ChildProcess(engine_spec(scoring, scoring.folder / "run.toml", 0), scoring.folder / "logs")

        async def play_all(url: str) -> None:
            for step, model in models.items():
                async with open_publisher(scoring, EngineDiscovery((url,))) as publisher:
                    await publisher.push(model, step)
                score = await score_policy(scoring, url, model, rows)
                scores[str(step)] = [round(score.sampled, 5), round(score.greedy, 5)]
            child.terminate()

        code = await child.run(functools.partial(tasks.start_soon, play_all))
    if len(scores) < len(models):
        raise RunFailedError(f"the engine ended with code {code}: {child.last_error()} (its log is {child.log_file})")
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--folder", type=Path, default=Path("runs/masking"), help="where the runs live")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--replot", action="store_true", help="run nothing; draw what is in the results")
    arguments = parser.parse_args()
    runs: list[Run] = msgspec.json.decode(arguments.results.read_bytes()) if arguments.results.exists() else []
    folder = arguments.folder.resolve()
    for seed, arm in [] if arguments.replot else itertools.product(arguments.seeds, arguments.arms):
        folder.mkdir(parents=True, exist_ok=True)
        with logs.log_to_file("masking", folder / "masking.log"):
            result = next((known for known in runs if (known["seed"], known["arm"]) == (seed, arm)), None)
            if result is None:
                result = train(seed, arm, folder)
                runs.append(result)
            measure(result, folder)
        lines = ",\n".join(msgspec.json.encode(known).decode() for known in runs)
        arguments.results.write_text(f"[\n{lines}\n]\n")
        print(f"seed {seed}, {arm}: {result['scores']}", flush=True)
    draw(runs)


if __name__ == "__main__":
    main()

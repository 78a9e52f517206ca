"""Real groups for `advantage_bias.py`: rewards and lengths of the demo policies' answers to training problems.

    python -m benchmarks.masking.stored_groups     after held_out_curve; writes groups.json

Sampled by four policies of the run with seed 1 without failures (warm start, and after 2, 4 and 8 steps), 8 completions
of each of 32 problems, with the run's settings and without selection.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import anyio
import msgspec

from benchmarks.masking.held_out_curve import HERE
from stream.errors import RunFailedError
from workers.demo.prepare import GROUP_SIZE, demo_settings
from workers.demo.scores import _play  # the public `evaluate` keeps means alone
from workers.demo.task import training_rows
from workers.engine_api.discovery import EngineDiscovery
from workers.launch.children import ChildProcess
from workers.launch.process import run_async
from workers.launch.specs import engine_spec
from workers.settings import Settings
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.publishing.publisher import open_publisher

STEPS = (2, 4, 8)
PROBLEMS = 32
SEED = 1


async def collect(scoring: Settings, models: dict[int, Path]) -> list[dict[str, Any]]:
    """Return groups of every policy, each on different problems."""
    results: list[dict[str, Any]] = []
    rows = training_rows(PROBLEMS * len(models), SEED)
    async with anyio.create_task_group() as tasks:
        child = ChildProcess(engine_spec(scoring, scoring.folder / "run.toml", 0), scoring.folder / "logs")

        async def play(url: str) -> None:
            for number, (step, model) in enumerate(models.items()):
                async with open_publisher(scoring, EngineDiscovery((url,))) as publisher:
                    await publisher.push(model, step)
                own = rows[number * PROBLEMS : (number + 1) * PROBLEMS]
                for group in await _play(scoring, url, model, own, GROUP_SIZE, scoring.rollout.temperature):
                    rewards = [completion.reward.value for completion in group.completions]
                    lengths = [sum(row.sampled_count for row in completion.rows) for completion in group.completions]
                    results.append({"step": step, "rewards": rewards, "lengths": lengths})
            child.terminate()

        code = await child.run(functools.partial(tasks.start_soon, play))
    if len(results) < len(rows):
        raise RunFailedError(f"the engine ended with code {code}: {child.last_error()} (its log is {child.log_file})")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/masking"), help="where held_out_curve left its runs")
    start = parser.parse_args().folder.resolve() / f"seed-{SEED}"
    checkpoints = CheckpointStore(start.with_name(f"seed-{SEED}-no-failures") / "checkpoints")
    models = {0: start / "model"} | {step: result.model for step in STEPS if (result := checkpoints.at_step(step))}
    groups = run_async(lambda: collect(demo_settings(start, SEED), models))
    lines = ",\n".join(msgspec.json.encode(group).decode() for group in groups)
    (HERE / "groups.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()

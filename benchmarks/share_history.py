"""A training step with rows apart and with rows that share their prefixes, for `train_step.py --share both`.

Each way is a process of its own, so that its peak memory is its own. The processes take turns step by step, so that a
busy machine slows both alike. Rows of a group have one prompt; every response has tokens of its own.
"""

import argparse
import json
import random
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import structlog
import transformers

from stream.records import Completion, Group, Prompt, Row, Span
from stream.validity import Measured
from workers import settings
from workers.train.step.batch import collate
from workers.train.step.learner import Learner

WAYS = {"rows": "off", "tree": "on"}
"""`train.share_history` by name of the figures."""


def make_group(number: int, prompt: int, response: int, size: int, vocabulary: int) -> Group:
    """Return a group of random tokens with rewards 0 and 1 in turns."""
    rng = random.Random(number)
    asked = struct.pack(f"{prompt}i", *(rng.randrange(vocabulary) for _ in range(prompt)))
    rows = [
        Row(
            prompt_ids=asked,
            token_ids=struct.pack(f"{response}i", *(rng.randrange(vocabulary) for _ in range(response))),
            sampled_ranges=[(0, response)],
            logprobs=struct.pack(f"{response}f", *(-rng.random() for _ in range(response))),
            spans=[Span(7, 0, response)],
        )
        for _ in range(size)
    ]
    completions = [
        Completion(index=i, rows=[row], reward=Measured(float(i % 2)), turns=1) for i, row in enumerate(rows)
    ]
    return Group(prompt=Prompt(id=f"train:0:{number}", messages=[], group_size=size), completions=completions)


def compare(config: Any, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return seconds (median of steps), peak memory in MB and forwarded tokens of a step, both ways."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
        sizes = [given.prompt, given.response, given.group, given.groups, given.threads, given.micro_batch_tokens]
        processes = {}
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.share_history", way, str(folder / "base"), *map(str, sizes)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes[way] = stack.enter_context(process)
        steps: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(given.steps + 1):
            for way, process in processes.items():
                print("step", file=process.stdin, flush=True)
                line = next(iter(process.stdout or ()), "")
                if not line:
                    raise SystemExit(f"the process for {way} ended; its output says why")
                if number:  # the first step warms up
                    steps[way].append(json.loads(line))
    return {
        way: {
            "seconds": round(statistics.median(step["seconds"] for step in found), 3),
            "peak_mb": found[-1]["peak_mb"],
            "tokens": found[-1]["tokens"],
        }
        for way, found in steps.items()
    }


def main() -> None:
    """Step whenever a line arrives, and print what the step took."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    way, base = sys.argv[1:3]
    prompt, response, size, groups, threads, micro_batch_tokens = map(int, sys.argv[3:])
    learner = Learner(
        settings.Settings(
            model=settings.ModelSettings(path=base, dtype="float32"),
            data=settings.DataSettings(path="none"),
            run=settings.RunSettings(threads=threads),
            train=settings.TrainSettings(share_history=WAYS[way], micro_batch_tokens=micro_batch_tokens),
        )
    )
    batch = collate([make_group(i, prompt, response, size, learner.vocab_size) for i in range(groups)])
    for _ in sys.stdin:
        began = time.perf_counter()
        report = learner.step(batch, version=8)
        seconds = time.perf_counter() - began
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // 10**6
        figures = {"seconds": seconds, "peak_mb": peak_mb, "tokens": report.metrics["tokens/forwarded"]}
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()

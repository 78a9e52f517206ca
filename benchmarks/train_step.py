"""Time of one training step on the demo's model: collate, masks, advantages, forward, backward, AdamW.

    python benchmarks/train_step.py [--threads 2] [--rows 128] [--steps 10] [--updates 1] [--micro-batch-tokens 16384]

Prints one line of JSON. Caveats: random weights and tokens (the work is the same), rows of 100 to 160 tokens of which
about 45 % are sampled, and whatever else the machine is doing: `step_cpu_s`,
the processor time of all threads, is what a busy machine distorts least.
"""

import argparse
import json
import random
import resource
import statistics
import struct
import tempfile
import time
from pathlib import Path

import transformers

from stream.records import Completion, Group, Prompt, Row, Span
from stream.validity import Measured
from workers import settings
from workers.train.batch import collate
from workers.train.learner import Learner

VOCABULARY = 350


def write_model(folder: Path) -> None:
    """The demo's model: Qwen3, 439k parameters."""
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_row(rng: random.Random) -> Row:
    """A three-turn episode: prompt, call, result, call, result, answer."""
    turns = [(rng.randint(15, 25), rng.randint(6, 12)) for _ in range(3)]
    length = sum(a + t for a, t in turns)
    sampled, place = [], 0
    for assistant, tool in turns:
        sampled.append((place, place + assistant))
        place += assistant + tool
    prompt = rng.randint(30, 60)
    logprobs = [-rng.random() for start, end in sampled for _ in range(start, end)]
    return Row(
        prompt_ids=struct.pack(f"{prompt}i", *(rng.randrange(VOCABULARY) for _ in range(prompt))),
        token_ids=struct.pack(f"{length}i", *(rng.randrange(VOCABULARY) for _ in range(length))),
        sampled=sampled,
        logprobs=struct.pack(f"{len(logprobs)}f", *logprobs),
        spans=[Span(7, start, end) for start, end in sampled],
    )


def make_groups(rows: int, size: int = 8) -> list[Group]:
    """Groups of 8 with rewards 0 and 1."""
    rng = random.Random(0)
    return [
        Group(
            prompt=Prompt(id=f"train:0:{number}", messages=[], group_size=size),
            completions=[
                Completion(index=i, rows=[make_row(rng)], reward=Measured(float(rng.random() < 0.5)), turns=3)
                for i in range(size)
            ],
        )
        for number in range(rows // size)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    arguments = parser.parse_args()
    groups = make_groups(arguments.rows)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "base")
        learner = Learner(
            settings.Settings(
                model=settings.Model(path=f"{folder}/base"),
                data=settings.Data(path="none"),
                train=settings.Train(
                    threads=arguments.threads,
                    learning_rate=3e-4,
                    updates_per_batch=arguments.updates,
                    micro_batch_tokens=arguments.micro_batch_tokens,
                ),
            )
        )
        collating, stepping, working = [], [], []
        for _ in range(arguments.steps + 2):
            began = time.perf_counter()
            batch = collate(groups)
            collated = time.perf_counter()
            busy = time.process_time()
            report = learner.step(batch, version=8)
            working.append(time.process_time() - busy)
            collating.append(collated - began)
            stepping.append(time.perf_counter() - collated)
        began = time.perf_counter()
        learner.save_weights(Path(folder) / "weights")
        saving = time.perf_counter() - began
    print(
        json.dumps(
            {
                "rows": arguments.rows,
                "threads": arguments.threads,
                "updates": arguments.updates,
                "micro_batch_tokens": arguments.micro_batch_tokens,
                "tokens": int(batch.lengths_R.sum()),
                "loss_tokens": report.metrics["tokens/loss"],
                "collate_s": round(statistics.median(collating[2:]), 4),
                "step_s": round(statistics.median(stepping[2:]), 4),
                "step_s_min": round(min(stepping[2:]), 4),
                "step_cpu_s": round(statistics.median(working[2:]), 4),
                "save_weights_s": round(saving, 4),
                "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )


if __name__ == "__main__":
    main()

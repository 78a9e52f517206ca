"""Time of one training step: collate, masks, advantages, forward, backward, AdamW, and how much of it is the model's.

    python -m benchmarks.train_step [--json] [--model half-billion|small|100m] [--packing auto] [--attention auto]
                                    [--checkpointing] [--rows 64] [--steps 8] [--updates 1]
                                    [--micro-batch-tokens 16384] [--threads 1] [--check]
    python -m benchmarks.train_step --share both [--prompt 256] [--response 64] [--group 8] [--groups 1] [--json]

==============  ==========================================================================================
`half-billion`  on a GPU: a random model of 0.5 billion parameters (the shape of Qwen2.5-0.5B) in bfloat16, rows of
                about a thousand tokens
`small`         the demo's model, float32, rows of 100 to 160 tokens, also on a CPU; `--small` is the same
`100m`          a random model of 100 million parameters, the rest as `small`
==============  ==========================================================================================

Prints tokens per second (all tokens of the rows, over the median step), model FLOPs utilization, the device, dtype,
attention and packing. `parts_ms` are the milliseconds of a median step, in the order of a trainer's work: `check`
(collate and mask each group, as it arrives), `merge`, `prepare` (masks of the batch, advantages, weights), `forward`
(log-probs of the loss tokens), `loss`, `backward`, `optimizer` (clipping and AdamW), `metrics`, `rest`. `share` is that
of forward and backward; with `--check` the exit code is 1 if it is below 85 %.

Model FLOPs utilization is model FLOPs of a step divided by its seconds and the card's peak. Model FLOPs count matrix
products only, twice as many backward as forward, without recomputation (PaLM, arXiv:2204.02311, appendix B): 6 x
parameters in products per token, the output layer for loss tokens only, and for attention 12 x layers x heads x head
size x half of the sum of squared row lengths (causal). Peaks are the makers' figures for dense bfloat16; None for
unknown cards and for float32.

`--share both` compares rows apart with rows that share their prefixes (`share_history.py`): seconds and peak memory of
a step, and the tokens that one pass forwards, by turns in one run, of the 100m model unless `--model` names another.

Weights and tokens are random, which does not change the work. `step_cpu_s`, the CPU time of all threads, is the figure
least affected by other load on a CPU.
"""

import argparse
import json
import platform
import random
import re
import resource
import statistics
import struct
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import structlog
import torch
import transformers

from benchmarks.share_history import compare
from stream.records import Completion, Group, Prompt, Row, Span
from stream.validity import Measured
from workers import settings
from workers.train.step import learner as learner_module
from workers.train.step import model_runner
from workers.train.step.batch import merge_batches
from workers.train.step.group_checks import check_group
from workers.train.step.learner import Learner

SMALL = transformers.Qwen3Config(
    vocab_size=350,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=384,
    tie_word_embeddings=True,
)
"""The demo's model: 439k parameters."""
HALF_BILLION = transformers.Qwen2Config(
    vocab_size=151_936,
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    tie_word_embeddings=True,
    max_position_embeddings=32_768,
)
"""494 million parameters."""
HUNDRED_MILLION = transformers.Qwen3Config(
    vocab_size=32_000,
    hidden_size=640,
    num_hidden_layers=14,
    num_attention_heads=10,
    num_key_value_heads=5,
    head_dim=64,
    intermediate_size=2048,
    tie_word_embeddings=True,
)
"""About 100 million parameters."""
MODELS = {
    "half-billion": (HALF_BILLION, 8, "bfloat16", 64),
    "small": (SMALL, 1, "float32", 128),
    "100m": (HUNDRED_MILLION, 1, "float32", 16),
}
"""Configuration, scale of the rows' lengths, dtype, number of rows."""
SHARE = 0.85
PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165.2e12,
}
"""Dense bfloat16 FLOPs a second, by words of the card's name; the first that fit (NVIDIA's data sheets)."""


def make_row(rng: random.Random, vocabulary: int, scale: int) -> Row:
    """A three-turn episode: prompt, call, result, call, result, answer."""
    turns = [(scale * rng.randint(15, 25), scale * rng.randint(6, 12)) for _ in range(3)]
    length = sum(a + t for a, t in turns)
    sampled, place = [], 0
    for assistant, tool in turns:
        sampled.append((place, place + assistant))
        place += assistant + tool
    prompt = scale * rng.randint(30, 60)
    logprobs = [-rng.random() for start, end in sampled for _ in range(start, end)]
    return Row(
        prompt_ids=struct.pack(f"{prompt}i", *(rng.randrange(vocabulary) for _ in range(prompt))),
        token_ids=struct.pack(f"{length}i", *(rng.randrange(vocabulary) for _ in range(length))),
        sampled_ranges=sampled,
        logprobs=struct.pack(f"{len(logprobs)}f", *logprobs),
        spans=[Span(7, start, end) for start, end in sampled],
    )


def make_groups(rows: int, vocabulary: int, scale: int, size: int = 8) -> list[Group]:
    """Groups of 8 with rewards 0 and 1."""
    rng = random.Random(0)
    return [
        Group(
            prompt=Prompt(id=f"train:0:{number}", messages=[], group_size=size),
            completions=[
                Completion(
                    index=i,
                    rows=[make_row(rng, vocabulary, scale)],
                    reward=Measured(float(rng.random() < 0.5)),
                    turns=3,
                )
                for i in range(size)
            ],
        )
        for number in range(rows // size)
    ]


def step_flops(model, lengths: list[int], loss_tokens: float, updates: int) -> float:
    """Return model FLOPs of one step, see the module docstring."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inner = sum(m.weight.numel() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head")
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * size * sum(n * n for n in lengths) / 2
    products = 6 * (inner * sum(lengths) + model.get_output_embeddings().weight.numel() * loss_tokens)
    return updates * (products + attention)


def peak_flops(card: str) -> float | None:
    """Return the peak of a card by name; None if unknown. A10G, L40 and laptop cards are different cards."""
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b(?! D\b| Laptop)", card)), None)


def settled(device: torch.device) -> float:
    """Synchronize the device and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Parts:
    """Seconds of the parts of a step, by wrapping the functions that do them."""

    def __init__(self, learner: Learner) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = learner.device
        self._wrap(learner_module, "prepare", "prepare")
        self._wrap(learner_module, "step_metrics", "metrics")
        self._wrap(learner_module, "correction_step_metrics", "metrics")
        self._wrap(learner_module, "describe_completions", "metrics")
        self._wrap(model_runner, "micro_batch_loss", "loss")
        self._wrap(learner.runner, "_forward", "forward")
        self._wrap(torch.Tensor, "backward", "backward")
        self._wrap(learner.optimizer, "clip_gradients", "optimizer")
        self._wrap(learner.optimizer, "step", "optimizer")

    def _wrap(self, owner: Any, function: str, part: str) -> None:
        inner = getattr(owner, function)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = settled(self._device)
            result = inner(*arguments, **named)
            self.seconds[part] += settled(self._device) - began
            return result

        setattr(owner, function, timed)

    def pop(self) -> dict[str, float]:
        """Return the seconds since the previous call."""
        found, self.seconds = dict(self.seconds), defaultdict(float)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--model", choices=tuple(MODELS), help="default: half-billion; 100m with --share")
    parser.add_argument("--small", dest="model", action="store_const", const="small")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=0, help="128 of the small model, else 64")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--packing", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--share", choices=("both",))
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--groups", type=int, default=1)
    given = parser.parse_args()
    if given.share:
        compared = compare(MODELS[given.model or "100m"][0], given)
        print(json.dumps(compared) if given.json else "\n".join(f"{way:6} {found}" for way, found in compared.items()))
        return 0
    given.model = given.model or "half-billion"
    gpu = torch.cuda.is_available()
    if not gpu and given.model == "half-billion":
        print("there is no GPU here; --small or --model 100m runs on the CPU", file=sys.stderr)
        return 2
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    config, scale, dtype, rows = MODELS[given.model]
    rows = given.rows or rows
    groups = make_groups(rows, config.vocab_size, scale)
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/base")
        learner = Learner(
            settings.Settings(
                model=settings.ModelSettings(path=f"{folder}/base", dtype=dtype),
                data=settings.DataSettings(path="none"),
                run=settings.RunSettings(threads=given.threads),
                train=settings.TrainSettings(
                    learning_rate=3e-4 if given.model == "small" else 1e-6,
                    updates_per_batch=given.updates,
                    micro_batch_tokens=given.micro_batch_tokens,
                    packing=given.packing,
                    attention=given.attention,
                    gradient_checkpointing=given.checkpointing,
                ),
            )
        )
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        parts, timings, working = Parts(learner), [], []
        for _ in range(given.steps + 2):
            began = settled(learner.device)
            checked = [check_group(group, learner.settings, 8, config.vocab_size) for group in groups]
            received = time.perf_counter()
            batch = merge_batches([each.batch for each in checked])
            merged = time.perf_counter()
            busy = time.process_time()
            parts.pop()
            report = learner.step(batch, version=8)
            took = settled(learner.device) - merged
            working.append(time.process_time() - busy)
            within = parts.pop()
            rest = took - sum(within.values())
            timings.append(
                {"check": received - began, "merge": merged - received, **within, "rest": rest, "step": took}
            )
        began = time.perf_counter()
        learner.copy_weights()(Path(folder) / "weights")
        saving = time.perf_counter() - began
    card = torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine()
    times = {part: statistics.median(each[part] for each in timings[2:]) for part in timings[-1]}
    lengths, step_s = batch.lengths_R.tolist(), times["step"]
    share = (times["forward"] + times["backward"]) / (times["check"] + times["merge"] + step_s)
    flops = step_flops(learner.model, lengths, report.metrics["tokens/loss"], given.updates)
    peak = peak_flops(card) if gpu and dtype == "bfloat16" else None
    result = {
        "device": card,
        "dtype": dtype,
        "attention": learner.model.config._attn_implementation,
        "packing": learner.runner.policy.packed,
        "checkpointing": given.checkpointing,
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "rows": rows,
        "threads": given.threads,
        "updates": given.updates,
        "micro_batch_tokens": given.micro_batch_tokens,
        "tokens": sum(lengths),
        "loss_tokens": report.metrics["tokens/loss"],
        "tokens_per_s": round(sum(lengths) / step_s),
        "model_tflops_per_s": round(flops / step_s / 1e12, 4),
        "mfu": None if peak is None else round(flops / step_s / peak, 4),
        "share": round(share, 4),
        "parts_ms": {part: round(1000 * seconds, 2) for part, seconds in times.items()},
        "step_s": round(step_s, 4),
        "step_s_min": round(min(each["step"] for each in timings[2:]), 4),
        "step_cpu_s": round(statistics.median(working[2:]), 4),
        "save_weights_s": round(saving, 4),
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "gpu_peak_mib": torch.cuda.max_memory_allocated() // 2**20 if gpu else None,
    }
    print(json.dumps(result) if given.json else "\n".join(f"{name:20} {value}" for name, value in result.items()))
    if given.check and share < SHARE:
        print(f"forward and backward take less than {SHARE:.0%} of a step", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

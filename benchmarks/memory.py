"""The trainer's memory as it is predicted, and as it is: `python -m benchmarks.memory [--json] [--only NAME ...]`.

For each case a process of its own loads a model, trains three steps of groups that share their prompts, with the
weights on their way to disk meanwhile as in a run, and reports its largest resident size since the model was loaded.
`check` is what `penstock check` predicts from the model's configuration, `trainer` what the trainer predicts once the
model is loaded; both for the number of tokens that the largest pass had. `seconds` is the time of the prediction.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import structlog
import torch
import transformers

from benchmarks.share_history import make_group
from workers import settings
from workers.demo.base_models import FOLDERS, write_base_model
from workers.train.model.pass_memory import measure_model
from workers.train.step.batch import collate
from workers.train.step.learner import Learner
from workers.train.step.memory_plan import plan_memory

_SMALL: Final = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
_SMOL: Final = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
_SHAPES: Final[dict[str, tuple[str, dict[str, int]]]] = {
    "llama-30m": ("LlamaConfig", _SMALL | {"num_attention_heads": 6, "num_key_value_heads": 6}),
    "qwen-30m": ("Qwen3Config", _SMALL | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}),
    "llama-135m": ("LlamaConfig", _SMOL | {"num_attention_heads": 9, "num_key_value_heads": 3}),
}
_VOCABULARY: Final = 49_152
CASES: Final[dict[str, dict[str, Any]]] = {
    f"{model} {kind}{more}": {"model": model, "lora": 16 if kind == "lora" else 0} | extra
    for model in ("calculator", "tool-caller", *_SHAPES)
    for kind in ("full", "lora")
    for more, extra in (("", {}), *([(" recomputed", {"recompute": True})] if model == "llama-135m" else []))
} | {
    "llama-135m full apart": {"model": "llama-135m", "lora": 0, "share": "off"},
    "llama-135m lora published": {"model": "llama-135m", "lora": 16, "publish": "adapter"},
    "llama-135m lora bfloat16": {"model": "llama-135m", "lora": 16, "dtype": "bfloat16"},
    "llama-135m full bfloat16": {"model": "llama-135m", "lora": 0, "dtype": "bfloat16"},
}


def model_folder(name: str, parent: Path) -> Path:
    """Return the folder of a shipped model, or of a random one that is written there."""
    folder = parent / name
    if folder.exists():
        return folder
    if name in FOLDERS:
        write_base_model(name, folder)
    else:
        kind, sizes = _SHAPES[name]
        config = getattr(transformers, kind)(vocab_size=_VOCABULARY, tie_word_embeddings=True, **sizes)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def run_case(
    folder: Path, case: dict[str, Any], tokens: int, groups: int, prompt: int, response: int
) -> dict[str, Any]:
    """Train with these settings; return what was predicted and what was."""
    its = settings.Settings(
        model=settings.ModelSettings(path=str(folder), dtype=case.get("dtype", "float32")),
        data=settings.DataSettings(path="none"),
        run=settings.RunSettings(threads=2),
        lora=settings.LoraSettings(rank=case["lora"]),
        weights=settings.WeightsSettings(transport=case.get("publish", "files")),
        train=settings.TrainSettings(
            micro_batch_tokens=tokens,
            share_history=case.get("share", "on"),
            gradient_checkpointing=case.get("recompute", False),
        ),
    )
    began = time.perf_counter()
    model = measure_model(its, folder, shares=case.get("share") != "off")
    seconds = time.perf_counter() - began
    before = plan_memory(its, parameters=model.parameters, trained=model.trained, passes=model.passes)
    learner = Learner(its)
    batch = collate([make_group(i, prompt, response, 8, learner.vocab_size) for i in range(groups)])
    parts = learner.runner.plan(batch, torch.ones(len(batch.lengths_R), dtype=torch.bool)).parts
    largest = max(
        len(part.tree.tokens_P) if part.tree else len(part.rows) * int(batch.lengths_R[part.rows].max())
        for part in parts
    )
    loaded = learner.plan_memory(model.passes)
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident size begins anew
    with tempfile.TemporaryDirectory() as parent:
        for step in range(3):
            writing = threading.Thread(target=learner.copy_weights(), args=(Path(parent) / str(step),))
            writing.start()
            learner.step(batch, version=8)
            writing.join()
    peak = _largest_resident_size()
    check, trainer = before.peak(largest), loaded.peak(largest)
    return {
        "passes": len(parts),
        "tokens": largest,
        "peak_mb": round(peak / 1e6),
        "check": round(check / peak - 1, 3),
        "trainer": round(trainer / peak - 1, 3),
        "per_token_mb": round(model.passes.per_token / 1e6, 3),
        "seconds": round(seconds, 2),
        "parts_mb": {
            name: round(getattr(loaded, name) / 1e6) for name in ("process", "weights", "optimizer", "copies")
        },
    }


def _largest_resident_size() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Print a table of all cases; with `--case` run one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=32)
    parser.add_argument("--case")
    parser.add_argument("--folder")
    given = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if given.case:
        places = given.prompt + 8 * given.response
        groups = max(2, -(-2 * given.tokens // places))
        case = CASES[given.case]
        print(json.dumps(run_case(Path(given.folder), case, given.tokens, groups, given.prompt, given.response)))
        return
    with tempfile.TemporaryDirectory() as parent:
        for name, case in CASES.items():
            if given.only and not any(name.startswith(each) for each in given.only):
                continue
            folder = model_folder(case["model"], Path(parent))
            sizes = [f"--{option}={getattr(given, option)}" for option in ("tokens", "prompt", "response")]
            command = [sys.executable, "-m", "benchmarks.memory", "--case", name, "--folder", str(folder), *sizes]
            found = subprocess.run(command, check=False, capture_output=True, text=True)
            if found.returncode:
                print(f"{name}: {found.stderr.splitlines()[-1:]}")
                continue
            figures = json.loads(found.stdout.splitlines()[-1])
            if given.json:
                print(json.dumps({"case": name} | figures), flush=True)
                continue
            print(
                f"{name:28} {figures['tokens']:6,} tokens  peak {figures['peak_mb']:6,} MB  "
                f"check {figures['check']:+.0%}  trainer {figures['trainer']:+.0%}  {figures['seconds']} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

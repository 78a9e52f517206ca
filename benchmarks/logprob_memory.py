"""Peak memory of the loss's log-probs, block by block and all at once, on the same inputs.

    python -m benchmarks.logprob_memory [--json] [--check] [--tokens 8192] [--vocabulary 150000] [--hidden 64]

Each variant runs in its own process: make hidden states and the output layer's weight, then compute log-probs of the
targets and both gradients. The figure is the increase of resident memory over that after making the inputs. Results of
both variants are compared. `--check` exits with 1 unless the peak in blocks is below a quarter of the other and values
agree.

The variant "at once" is the leanest common one (`cross_entropy` on logits, T = 1), about three times the logits; a loss
with `log_softmax`, entropy and a temperature needs more. At the default sizes it needs 15 GB of free memory. Hidden
states are narrower than a real model's, so that the vocabulary dominates.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from workers.train.model.logit_blocks import LogitTransform, chunked_logprobs

WAYS = ("blockwise", "at once")
NEAR = 1e-5
"""Of float32 sums over 150,000 words in another order, relative to the largest value."""


def blockwise(hidden, weight, targets):
    return chunked_logprobs(hidden, weight, None, targets, LogitTransform()).logprobs_N


def at_once(hidden, weight, targets):
    return -torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")


def resident() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(way: str, tokens: int, vocabulary: int, hidden: int, out: Path) -> dict[str, float]:
    """Measure one variant in this process."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    share = torch.randn(tokens, generator=generator)
    small = blockwise if way == "blockwise" else at_once
    small(states[:2], weight[:50], targets[:2] % 50).sum().backward()  # what torch sets up once
    states.grad = weight.grad = None
    before, began = resident(), time.perf_counter()
    logprobs = small(states, weight, targets)
    (logprobs * share).sum().backward()
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    torch.save([logprobs.detach(), states.grad, weight.grad], out)
    return {"peak_mib": round((peak - before) / 2**20, 1), "seconds": round(seconds, 1)}


def free_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = (given.tokens, given.vocabulary, given.hidden)
    if given.way:
        print(json.dumps(measure(given.way, *sizes, given.out)))
        return 0
    logits = given.tokens * given.vocabulary * 4
    if free_bytes() < 3.3 * logits:
        print(
            f"{3.3 * logits / 1e9:.0f} GB must be free for the way with all logits; use fewer --tokens", file=sys.stderr
        )
        return 2
    result, values = {}, []
    options = [f"--{name}={size}" for name, size in zip(("tokens", "vocabulary", "hidden"), sizes, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            out = Path(folder) / "values.pt"
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "benchmarks.logprob_memory",
                *options,
                f"--way={way}",
                f"--out={out}",
            ]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            result[way] = json.loads(done.stdout)
            values.append(torch.load(out))
    errors = [float((one - other).abs().max() / other.abs().max()) for one, other in zip(*values, strict=True)]
    ratio = result["blockwise"]["peak_mib"] / result["at once"]["peak_mib"]
    report = {
        **dict(zip(("tokens", "vocabulary", "hidden"), sizes, strict=True)),
        "logits_mib": round(logits / 2**20),
        **{f"{way.replace(' ', '_')}_{name}": value for way in WAYS for name, value in result[way].items()},
        "ratio": round(ratio, 4),
        "error": dict(zip(("logprobs", "hidden_gradient", "weight_gradient"), errors, strict=True)),
    }
    print(json.dumps(report) if given.json else "\n".join(f"{name:24} {value}" for name, value in report.items()))
    return int(given.check and (ratio >= 0.25 or max(errors) > NEAR))


if __name__ == "__main__":
    sys.exit(main())

"""Sample a model's score on candidates of tasks: `python try_tasks.py MODEL [NAME...]`.

Which tasks a model can learn shows in a minute: it must solve some problems by chance, and not yet most of them.
`candidates.toml` lists the tasks. Every prompt is that of `tasks.py`, sampled at temperature 1 as in a run.
"""

import argparse
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
from tasks import Solved
from transformers import AutoModelForCausalLM, AutoTokenizer

HELD_OUT = 2_000_000
"""First of the seeds of these problems."""


def sample(model: Any, tokenizer: Any, prompts: list[list[dict[str, str]]], samples: int, max_tokens: int) -> list[str]:
    """Return `samples` answers to each prompt. A prompt is forwarded once, and its cache copied for each answer."""
    texts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    mask, end = batch["attention_mask"], tokenizer.eos_token_id
    with torch.inference_mode():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = model(batch["input_ids"], attention_mask=mask, position_ids=positions, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits[:, -1].repeat_interleave(samples, 0)
        cache.batch_repeat_interleave(samples)
        mask, position = mask.repeat_interleave(samples, 0), positions[:, -1:].repeat_interleave(samples, 0)
        answers = torch.empty(len(logits), 0, dtype=torch.int64)
        for _ in range(max_tokens):
            tokens = torch.multinomial(logits.softmax(-1), 1)
            tokens[(answers == end).any(1)] = end
            answers = torch.cat([answers, tokens], 1)
            if bool((answers == end).any(1).all()):
                break
            mask, position = torch.cat([mask, torch.ones_like(tokens)], 1), position + 1
            output = model(tokens, attention_mask=mask, position_ids=position, past_key_values=cache)
            logits = output.logits[:, -1]
    return tokenizer.batch_decode(answers, skip_special_tokens=True)


def measure(
    model: Any, tokenizer: Any, name: str, task: dict[str, Any], problems: int, samples: int, solved: int
) -> str:
    """Return one row of the table: how often the answers were right."""
    environments = [Solved(name, task.get("config", {}), solved) for _ in range(problems)]
    prompts = [each.reset(HELD_OUT + number) for number, each in enumerate(environments)]
    began, scores, answers = time.monotonic(), list[list[float]](), list[str]()
    for start in range(0, problems, 8):
        part = sample(model, tokenizer, prompts[start : start + 8], samples, task["max_tokens"])
        answers += part
        for number, environment in enumerate(environments[start : start + 8]):
            own = part[number * samples : (number + 1) * samples]
            scores.append([environment.get_reward([{"role": "assistant", "content": text}]) for text in own])
    flat = [score for own in scores for score in own]
    right = sum(score >= 1.0 for score in flat) / len(flat)
    mixed = sum(len(set(own)) > 1 for own in scores) / problems
    shown = "; ".join(
        f"{environments[n].answer!r}: {answers[n * samples]!r}".replace("|", "/") for n in range(min(3, problems))
    )
    tokens = tokenizer.apply_chat_template(prompts[0], add_generation_prompt=True, tokenize=True)["input_ids"]
    return (
        f"| {name} | {len(tokens)} | {right:.1%} | {sum(flat) / len(flat):.3f} | {mixed:.0%} | "
        f"{time.monotonic() - began:.0f} s | {shown} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("names", nargs="*", help="default: all of candidates.toml")
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--solved", type=int, default=4, help="solved problems that a prompt shows")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.random.manual_seed(1)
    tasks = tomllib.loads((Path(__file__).parent / "candidates.toml").read_text())
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    print("| data set | tokens of a prompt | right | mean score | groups with a difference | time | want: got |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for name in options.names or tasks:
        print(
            measure(model, tokenizer, name, tasks[name], options.problems, options.samples, options.solved), flush=True
        )


if __name__ == "__main__":
    main()

"""The control experiment: GRPO on the demo's task as one plain loop, without a pipeline.

The pipeline's learning is compared with it. They share only the demo's model folder and prompt rows; generation, tools
and loss are separate. Run it by hand:

    python tests/sync_grpo.py MODEL_FOLDER --steps 40 --seed 1
"""

import argparse
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

MAX_TURNS, MAX_TOKENS_PER_TURN = 4, 40
TOOLS = {"add": lambda a, b: a + b, "subtract": lambda a, b: a - b, "multiply": lambda a, b: a * b}


class Score(NamedTuple):
    sampled: float
    greedy: float
    turns: float


@dataclass
class Episode:
    """Token ids with a mask and a log-prob for each (0 if not sampled); `reward` is set at the end."""

    row: dict
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    calls: int = 0
    turns: int = 0
    reward: float | None = None
    turn: list[int] = field(default_factory=list)

    def extend(self, ids, mask, logprobs):
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs


def run(folder, rows, steps, prompts=16, group=8, lr=3e-4, seed=0, out=None, progress=None):
    """Train; returns (model, tokenizer) and each step's mean reward. Saves the model to `out` if given."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    rewards = []
    for step in range(steps):
        batch = [row for row in rows[step * prompts : (step + 1) * prompts] for _ in range(group)]
        assert len(batch) == prompts * group, f"{len(rows)} rows do not last for {steps} steps of {prompts}"
        episodes = play(model, tokenizer, batch, 1.0, generator)
        reward_GN = torch.tensor([episode.reward for episode in episodes]).view(prompts, group)
        rewards.append(reward_GN.mean().item())
        std_G1 = reward_GN.std(dim=1, keepdim=True)
        advantage_B = ((reward_GN - reward_GN.mean(dim=1, keepdim=True)) / (std_G1 + 1e-4)).flatten()
        keep = (std_G1 > 0).expand(-1, group).flatten().tolist()
        kept = [episode for episode, useful in zip(episodes, keep, strict=True) if useful]
        if kept:
            optimizer.zero_grad()
            loss_of(model, kept, advantage_B[torch.tensor(keep)]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if progress:
            progress(step + 1, rewards[-1], len(kept) // group)
    if out is not None:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    return (model, tokenizer), rewards


def loss_of(model, episodes, advantage_B, clip=0.2):
    """The clipped surrogate, averaged over the batch's sampled tokens."""
    ids_BT, old_BT = pad([e.ids for e in episodes]), pad([e.logprobs for e in episodes])[:, 1:]
    mask_BT = pad([e.mask for e in episodes])[:, 1:]
    logits_BTV = model(input_ids=ids_BT[:, :-1]).logits
    new_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
    ratio_BT = ((new_BT - old_BT) * mask_BT).exp()
    gain_BT = torch.minimum(ratio_BT * advantage_B[:, None], ratio_BT.clamp(1 - clip, 1 + clip) * advantage_B[:, None])
    return -(gain_BT * mask_BT).sum() / mask_BT.sum()


def play(model, tokenizer, rows, temperature, generator=None):
    """Play one episode for each row, all in parallel."""
    episodes = []
    for row in rows:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        episodes.append(Episode(row, ids, [0] * len(ids), [0.0] * len(ids)))
    for _ in range(MAX_TURNS):
        going = [episode for episode in episodes if episode.reward is None]
        if not going:
            break
        generate_turn(model, tokenizer, going, temperature, generator)
        for episode in going:
            answer_turn(tokenizer, episode)
    for episode in episodes:
        episode.reward = episode.reward or 0.0
    return episodes


@torch.no_grad()
def generate_turn(model, tokenizer, episodes, temperature, generator):
    """Sample one turn for all episodes; temperature 0 is greedy."""
    width = max(len(episode.ids) for episode in episodes)
    prompt_BT = torch.tensor([[tokenizer.pad_token_id] * (width - len(e.ids)) + e.ids for e in episodes])
    attended_BT = torch.tensor([[0] * (width - len(e.ids)) + [1] * len(e.ids) for e in episodes])
    cache, sampled, logprobs = DynamicCache(config=model.config), [], []
    feed_BT, position_BT = prompt_BT, (attended_BT.cumsum(1) - 1).clamp(min=0)
    over_B = torch.zeros(len(episodes), dtype=torch.bool)
    while len(sampled) < MAX_TOKENS_PER_TURN and not over_B.all():
        out = model(
            input_ids=feed_BT,
            attention_mask=attended_BT,
            position_ids=position_BT,
            past_key_values=cache,
            logits_to_keep=1,
        )
        scores_BV = (out.logits[:, -1] / (temperature or 1.0)).log_softmax(-1)
        token_B1 = (
            torch.multinomial(scores_BV.exp(), 1, generator=generator) if temperature else scores_BV.argmax(-1)[:, None]
        )
        sampled.append(token_B1)
        logprobs.append(scores_BV.gather(-1, token_B1))
        over_B |= token_B1[:, 0] == tokenizer.eos_token_id
        feed_BT, position_BT = token_B1, position_BT[:, -1:] + 1
        attended_BT = torch.cat([attended_BT, torch.ones_like(token_B1)], dim=1)
    for episode, tokens, scores in zip(
        episodes, torch.cat(sampled, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True
    ):
        ended = tokenizer.eos_token_id in tokens
        length = tokens.index(tokenizer.eos_token_id) + 1 if ended else len(tokens)
        episode.turn = tokens[:length]
        episode.extend(tokens[:length], 1, scores[:length])


def answer_turn(tokenizer, episode):
    """Append the environment's response to the sampled turn (tool results), or set the reward."""
    text = tokenizer.decode(episode.turn, skip_special_tokens=True)
    calls = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    episode.turns += 1
    if episode.turn[-1] != tokenizer.eos_token_id:
        episode.reward = 0.0
    elif not calls:
        answer = re.fullmatch(r"Answer: (-?\d+)", text.strip())
        episode.reward = float(bool(episode.calls and answer and int(answer[1]) == episode.row["answer"]))
    else:
        reply = "\n"
        for call in calls:
            reply += f"<|im_start|>tool\n<tool_response>{use_tool(episode, call)}</tool_response><|im_end|>\n"
        ids = tokenizer(reply + "<|im_start|>assistant\n")["input_ids"]
        episode.extend(ids, 0, [0.0] * len(ids))


def use_tool(episode, call):
    try:
        parsed = json.loads(call)
        a, b = parsed["arguments"]["a"], parsed["arguments"]["b"]
        if not (isinstance(a, int) and isinstance(b, int)) or set(parsed["arguments"]) != {"a", "b"}:
            return "error: two integers are needed"
        result = TOOLS[parsed["name"]](a, b)
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {type(error).__name__}"
    episode.calls += 1
    return str(result)


def evaluate(model, tokenizer, rows, samples=4, temperature=1.0, seed=0):
    """Mean reward on `rows`, sampled `samples` times and greedily, and the mean turns of the sampled episodes."""
    generator = torch.Generator().manual_seed(seed)
    sampled = [e for _ in range(samples) for e in play(model, tokenizer, rows, temperature, generator)]
    greedy = play(model, tokenizer, rows, 0.0)
    return Score(*(sum(values) / len(values) for values in (
        [e.reward for e in sampled], [e.reward for e in greedy], [e.turns for e in sampled]
    )))  # fmt: skip


def pad(lists):
    """Pad rows of unequal length with zeros on the right; returns one tensor."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(values) for values in lists], batch_first=True)


def main():
    from workers.demo.task import held_out_rows, training_rows

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, unseen = training_rows(options.steps * 16, options.seed), held_out_rows(200)
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    before = evaluate(AutoModelForCausalLM.from_pretrained(options.folder), tokenizer, unseen)
    began, began_cpu = time.perf_counter(), time.process_time()
    (model, _), rewards = run(options.folder, rows, options.steps, seed=options.seed, out=options.out)
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    after = evaluate(model, tokenizer, unseen)
    print(json.dumps({
        "before": before._asdict(), "after": after._asdict(), "rewards": [round(r, 3) for r in rewards],
        "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()

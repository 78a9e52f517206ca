"""Every limit of an episode in a whole run with a scripted engine: its reason is in the status and in the metrics.

The model's template drops earlier thoughts, so that completions of several rows are scored and trained as well.
"""

import json
import shutil

import anyio
import pytest
from tokenizers import Tokenizer

from stream.codec import decode
from stream.records import Group
from stream.trainer.archive import scan_archive
from tests.e2e.harness import summary_of
from tests.scripted_engine.engine import ScriptedEngine

pytestmark = [pytest.mark.full, pytest.mark.timeout(200)]

ENVIRONMENT = '''
import anyio


class Modes:
    """Each completion of a group is told to behave in a way of its own."""

    def reset(self, completion_index, **row):
        self.put_things = 0
        mode = MODES[completion_index]
        return f" mode={mode} " + "x " * {"long": 2000, "context": FILL}.get(mode, 0)

    def put(self, thing: str = "it") -> str:
        """Put a thing."""
        self.put_things += 1
        return "put"

    async def nap(self) -> str:
        """Sleep for longer than an episode may take."""
        await anyio.sleep(25)
        return "slept"

    def get_reward(self):
        return float(self.put_things)
'''
PUT = '<tool_call>{"name": "put", "arguments": {}}</tool_call>'
NAP = '<tool_call>{"name": "nap", "arguments": {}}</tool_call>'
SAYS = {
    "silent": "",
    "done": "Done.",
    "length": "a b c " * 400,
    "context": "a b c " * 400,
    "max_turns": PUT,
    "tool_calls": PUT * 5,
    "tool_errors": "<tool_call>oops</tool_call>",
    "tool_time": NAP,
    "long": "never asked",
    "forks": "Hm.</think>" + PUT,
}
MODES = list(SAYS)
MAX_LENGTH = 1200
DROPS = "text(message.content).split('</think>')[-1] -}}"


def archived(folder):
    return [decode(place.read_payload(), Group) for _, place in scan_archive(folder)]


async def test_each_limit_has_its_own_reason_in_queues_and_metrics(project):
    tokenizer = Tokenizer.from_file(str(project.table["model"]["path"] + "/tokenizer.json"))
    source = ENVIRONMENT.replace("MODES[", f"{MODES!r}[").replace("FILL", "500")
    (project.folder / "modes.py").write_text(source)
    project.prompts(2)
    model = shutil.copytree(project.table["model"]["path"], project.folder / "model")
    template = (model / "chat_template.jinja").read_text()
    forgetful = template.replace("text(message.content) -}}\n    {%- for call", DROPS + "\n    {%- for call")
    assert forgetful != template
    (model / "chat_template.jinja").write_text(forgetful)
    project.table["model"]["path"] = str(model)

    def reply(ids, _request):
        text = tokenizer.decode(ids, skip_special_tokens=False)
        mode = text.partition("mode=")[2].partition(" ")[0]
        if mode == "forks" and text.count("<|im_start|>tool") == 2:
            mode = "done"
        return tokenizer.encode(SAYS[mode] + "<|im_end|>", add_special_tokens=False).ids

    async with ScriptedEngine(reply, version="0", max_length=MAX_LENGTH) as engine:
        project.table |= {
            "environments": {"modes": f"{project.folder / 'modes.py'}:Modes"},
            "rewards": [],
            "engine": {"urls": [engine.url]},
            "filter": {"zero_variance": False},
        }
        project.table["train"]["batch_size"] = 2
        project.table["rollout"] |= {
            "group_size": len(MODES), "max_tokens_per_turn": 400, "max_tokens": 3000, "max_turns": 3,
            "max_tool_calls": 4, "episode_timeout_s": 10.0,
        }  # fmt: skip
        result = await anyio.to_thread.run_sync(lambda: project.run("run", str(project.write()), "--json"))
        summary = await anyio.to_thread.run_sync(summary_of, result, project)
        shown = await anyio.to_thread.run_sync(lambda: project.run("queues", str(project.run_folder), "--json"))
        asked = [tokenizer.decode(request.token_ids, skip_special_tokens=False) for request in engine.requests]

    cut = {"length": 2, "context": 2, "max_turns": 2, "tool_calls": 2, "tool_errors": 2, "tool_time": 2}
    states = {"valid": 18, "failed:prompt_too_long": 2}
    queues = json.loads(shown.stdout)
    assert (queues["truncated"], queues["rows"]) == (cut, states)
    (step,) = [json.loads(line) for line in (project.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert {reason: step[f"truncated/{reason}"] for reason in cut} == cut
    assert {state: step[f"rows/{state}"] for state in states} == states
    assert summary["completion_states"] == states
    # Completions that only end their turns, or only call tools, are scored: with 0 and with the amount put.
    assert step["reward/min"] == 0.0
    assert step["reward/max"] == 4.0
    assert not any("mode=long" in text for text in asked)
    groups = await anyio.to_thread.run_sync(archived, project.run_folder / "groups")
    forked = [completion for group in groups for completion in group.completions if len(completion.rows) > 1]
    assert [len(completion.rows) for completion in forked] == [3, 3]
    assert {completion.index for completion in forked} == {MODES.index("forks")}
    assert step["tokens/sampled"] == sum(r.sampled_count for g in groups for c in g.completions for r in c.rows)
    assert engine.too_long_count == 2  # one for each such completion: it is not sent again

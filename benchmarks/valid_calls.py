"""Share of valid calls of a base model on tools that it has not seen.

    python -m benchmarks.valid_calls [MODEL_FOLDER] [--samples 20] [--json]

For each environment of `unseen_tools.py`, of this repository's examples and pages, and for 40 environments with random
names and types, the model's first turn is sampled at temperature 1. A turn is valid if it calls a tool that exists and
Penstock's own validation accepts the arguments; an answer without a call counts as not valid.
"""

import argparse
import json
import keyword
import re
import runpy
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.unseen_tools import ENVIRONMENTS, prompt_of
from envs.builtin.calculator import Calculator
from envs.builtin.guess import Guess
from envs.tools import ToolArgumentError, bind_arguments, tool_specs
from tests.base_models.tool_transcripts import Difficulty, conversations
from workers.demo.base_models import write_base_model
from workers.rollout.tool_formats import TOOL_FORMATS

ROOT = Path(__file__).parents[1]
RANDOM_SETS = 40
_TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "str"}


def ours() -> Iterator[tuple[str, object, str]]:
    """Yield name, environment and prompt of this repository's own environments with tools."""
    yield "guess", Guess(), "I am thinking of a whole number from 1 to 100. Guess it."
    yield "calculator", Calculator(), "Start with 97, times 7, then minus 46."
    till = runpy.run_path(str(ROOT / "examples/own_env/envs/till.py"))["Till"]
    yield "till", till(), "Start with 88, plus 46."
    counter, capital = class_in("README.md", "Counter"), class_in("docs/coming-from.md", "Capital")
    yield "counter", counter(), "Count to 3."
    yield "capital", capital(), "What is the capital of Peru?"


def class_in(page: str, name: str) -> type:
    """Return the class of that name from a page's Python blocks."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    space: dict[str, type] = {}
    exec(next(block for block in blocks if f"class {name}" in block), space)
    return space[name]


def unseen() -> Iterator[tuple[str, object, str]]:
    """Yield name, environment and prompt of each class of `unseen_tools.py`."""
    for kind in ENVIRONMENTS:
        yield kind.__name__, kind(), prompt_of(kind)


def random_ones() -> Iterator[tuple[str, object, str]]:
    """Yield environments with random tools, parameters and prompts."""
    for number, conversation in zip(count(), conversations(20_000, Difficulty(4, 3, 1, 12)), strict=False):
        if number == RANDOM_SETS:
            return
        source = "from typing import Literal\nclass Random:\n" + "".join(map(method, conversation.tools))
        space: dict[str, type] = {}
        exec(source, space)
        yield (
            f"random-{number}",
            space["Random"](),
            next(message["content"] for message in conversation.messages if message["role"] == "user"),
        )


def method(tool: dict) -> str:
    """Return the source of a method with the tool's name and parameters."""
    properties = tool["function"]["parameters"]["properties"]
    parameters = ", ".join(f"{safe(name)}: {hint(schema)}" for name, schema in properties.items())
    return f"    def {safe(tool['function']['name'])}(self, {parameters}) -> str:\n        'Do it.'\n"


def safe(name: str) -> str:
    """Return a name that Python accepts."""
    return f"{name}_it" if keyword.iskeyword(name) or name in {"reset", "respond", "rows", "self"} else name


def hint(schema: dict) -> str:
    """Return the type hint of a schema."""
    if "enum" in schema:
        return f"Literal[{', '.join(map(repr, schema['enum']))}]"
    if schema["type"] == "array":
        return f"list[{hint(schema['items'])}]"
    return _TYPES[schema["type"]]


def sample_turns(model, tokenizer, environment, prompt: str, samples: int) -> list[str]:
    """Return sampled first turns as text."""
    tools = [spec.schema for spec in tool_specs(environment)]
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt")["input_ids"].repeat(samples, 1)
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=True, top_k=0, temperature=1.0
        )
    return tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def judge(environment, text: str) -> tuple[str, str]:
    """Return what the turn is (answer, valid, or the kind of its fault) and the name of the tool."""
    parsed = TOOL_FORMATS["hermes"].parse(text)
    if not parsed.calls:
        return ("answer" if "<tool_call>" not in text else "malformed"), ""
    call = parsed.calls[0]
    if call.name not in {spec.name for spec in tool_specs(environment)}:
        return "unknown tool", call.name
    try:
        bind_arguments(getattr(environment, call.name), call.arguments)
    except ToolArgumentError:
        return "wrong arguments", call.name
    return "valid", call.name


def measure(folder: Path, samples: int, show: int = 0) -> dict:
    """Return the share of valid turns of each group of environments, and how different the calls are."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    result, called, tools, distinct = {}, set(), 0, []
    for group, environments in (("ours", ours()), ("unseen", unseen()), ("random", random_ones())):
        verdicts: Counter[str] = Counter()
        by_environment = {}
        for name, environment, prompt in environments:
            tools += len(tool_specs(environment))
            texts = sample_turns(model, tokenizer, environment, prompt, samples)
            judged = [judge(environment, text) for text in texts]
            called |= {(name, tool) for verdict, tool in judged if verdict == "valid"}
            verdicts.update(verdict for verdict, _ in judged)
            by_environment[name] = sum(verdict == "valid" for verdict, _ in judged) / samples
            distinct.append(len(set(texts)) / samples)
            for text, (verdict, _) in list(zip(texts, judged, strict=True))[:show]:
                print(f"{name:12} {verdict:16} {text}")
        result[group] = {
            "valid": round(verdicts["valid"] / verdicts.total(), 3),
            "turns": dict(verdicts),
            "by_environment": {name: round(share, 2) for name, share in by_environment.items()},
        }
    return {
        "valid": {group: each["valid"] for group, each in result.items()},
        "tools_called": f"{len(called)} of {tools}",
        "distinct_turns": round(sum(distinct) / len(distinct), 3),
        **result,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="default: the shipped tool-caller")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print this many turns of each environment")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.random.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as shipped:
        if options.folder is None:
            write_base_model("tool-caller", Path(shipped))
        result = measure(options.folder or Path(shipped), options.samples, options.show)
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))

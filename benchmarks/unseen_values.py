"""Share of calls of `tool-caller` whose values come from the schemas and prompts of tools that it has not seen.

    python -m benchmarks.unseen_values [MODEL_FOLDER] [--json]

Each of 40 random sets has one or two tools with enumerations (also as `$ref`) and texts. All words are random letters.
For each tool of a set 40 first turns are sampled at temperature 1. A call is valid if the tool exists, it has exactly
the required arguments, each choice is in its enumeration, and each text occurs in the prompt.
"""

import argparse
import json
import random
import string
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.demo.base_models import write_base_model
from workers.rollout.tool_formats import TOOL_FORMATS

SETS = 40
CALLS = 40
"""Sampled turns for each tool of a set."""
_MAX_TOKENS = 160


@dataclass(frozen=True)
class ToolSet:
    """Schemas of tools and a prompt, all of words that no model has seen."""

    tools: list[dict[str, Any]]
    prompt: str


def tool_sets(seed: int) -> Iterator[ToolSet]:
    """Yield random sets of tools; equal seeds give equal ones."""
    rng = random.Random(seed)
    while True:
        tools = [_tool(rng) for _ in range(rng.choice((1, 1, 2)))]
        words = [_word(rng) if rng.random() < 0.85 else str(rng.randint(0, 999)) for _ in range(rng.randint(4, 20))]
        yield ToolSet(tools, " ".join(words).capitalize() + rng.choice((".", "?", "")))


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))


def _tool(rng: random.Random) -> dict[str, Any]:
    """Return a tool with one to three parameters, of which one at least is a choice or a text."""
    kinds = [rng.choice(("enum", "ref", "text"))]
    kinds += rng.choices(("enum", "ref", "text", "integer", "boolean"), k=rng.choice((0, 1, 1, 2)))
    rng.shuffle(kinds)
    definitions: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    for kind in kinds:
        name, choices = _word(rng), {"type": "string", "enum": [_word(rng) for _ in range(rng.randint(2, 4))]}
        match kind:
            case "enum":
                properties[name] = choices
            case "ref":
                definitions[name.capitalize()] = choices
                properties[name] = {"$ref": f"#/$defs/{name.capitalize()}"}
            case "text":
                properties[name] = {"type": "string"}
            case _:
                properties[name] = {"type": kind}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    name = f"{_word(rng)}_{_word(rng)}"
    return {"type": "function", "function": {"name": name, "parameters": parameters | {"$defs": definitions}}}


def resolved(tool: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schemas of a tool's parameters, with references replaced by what they name."""
    parameters = tool["function"]["parameters"]
    return {
        name: parameters["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        for name, schema in parameters["properties"].items()
    }


def sample_turns(model: Any, tokenizer: Any, tools: ToolSet, count: int) -> list[str]:
    """Return first turns, sampled at temperature 1, as text."""
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": tools.prompt}],
        tools=tools.tools,
        add_generation_prompt=True,
        return_tensors="pt",
    )["input_ids"].repeat(count, 1)
    with torch.no_grad():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_MAX_TOKENS,
            do_sample=True,
            top_k=0,
            temperature=1.0,
        )
    return list(tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True))


def fault(tools: ToolSet, text: str) -> tuple[str, str, dict[str, Any]]:
    """Return what is wrong with a turn, empty for a valid call, and the name and arguments of its call."""
    calls = TOOL_FORMATS["hermes"].parse(text).calls
    if not calls:
        return ("malformed" if "<tool_call>" in text else "no call"), "", {}
    (call, *_), schemas = calls, {tool["function"]["name"]: resolved(tool) for tool in tools.tools}
    if call.name not in schemas:
        return "unknown tool", call.name, call.arguments
    parameters = schemas[call.name]
    if set(call.arguments) != set(parameters):
        return "wrong parameters", call.name, call.arguments
    for name, schema in parameters.items():
        value = call.arguments[name]
        match schema:
            case {"enum": choices} if value not in choices:
                return "not a choice", call.name, call.arguments
            case {"type": "integer"} if type(value) is not int:
                return "not an integer", call.name, call.arguments
            case {"type": "boolean"} if type(value) is not bool:
                return "not a boolean", call.name, call.arguments
            case {"type": "string"} if not isinstance(value, str) or not value or value not in tools.prompt:
                if "enum" not in schema:
                    return "not in the prompt", call.name, call.arguments
    return "", call.name, call.arguments


def measure(folder: Path, seed: int = 0, show: int = 0, *, sets: int = SETS) -> dict[str, Any]:
    """Sample calls of the first sets; return the share of valid ones, and how many choices were never made."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    faults: Counter[str] = Counter()
    choices, chosen = set(), set()
    shares = []
    for number, (tools, _) in enumerate(zip(tool_sets(seed), range(sets), strict=False)):
        for tool in tools.tools:
            for name, schema in resolved(tool).items():
                choices |= {(number, tool["function"]["name"], name, choice) for choice in schema.get("enum", ())}
        turns = sample_turns(model, tokenizer, tools, CALLS * len(tools.tools))
        judged = [fault(tools, text) for text in turns]
        shares.append(sum(not problem for problem, _, _ in judged) / len(judged))
        faults.update(problem or "valid" for problem, _, _ in judged)
        for (problem, _, _), text in list(zip(judged, turns, strict=True))[:show]:
            print(f"{problem or 'valid':18} {text}")
        for problem, called, arguments in judged:
            if not problem:
                chosen |= {
                    (number, called, name, value)
                    for name, value in arguments.items()
                    if not isinstance(value, (list, dict))
                }
    return {
        "valid": round(faults["valid"] / faults.total(), 4),
        "worst_set": min(shares),
        "choices": len(choices),
        "never_chosen": len(choices - chosen),
        "turns": dict(faults.most_common()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="default: the shipped tool-caller")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print this many turns of each set")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as shipped:
        if options.folder is None:
            write_base_model("tool-caller", Path(shipped))
        result = measure(options.folder or Path(shipped), options.seed, options.show)
    print(json.dumps(result, indent=None if options.json else 1))

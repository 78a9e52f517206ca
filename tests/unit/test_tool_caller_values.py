"""Calls of the shipped `tool-caller` whose values come from schemas and prompts that it has not seen."""

import json

import pytest
import torch

from benchmarks.unseen_values import SETS, ToolSet, fault, measure, tool_sets
from workers.demo.base_models import write_base_model


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sets", [4, pytest.param(SETS, marks=pytest.mark.full)])
def test_nine_of_ten_calls_fit_unseen_enumerations_and_prompts_and_every_choice_is_made(tmp_path, sets):
    write_base_model("tool-caller", tmp_path)
    torch.set_num_threads(1)
    result = measure(tmp_path, seed=0, sets=sets)
    assert result["valid"] >= 0.9, result
    assert result["choices"] > 2 * sets
    assert result["never_chosen"] == 0, result


PROPERTIES = {"kind": {"$ref": "#/$defs/Kind"}, "note": {"type": "string"}, "count": {"type": "integer"}}
PARAMETERS = {"properties": PROPERTIES, "$defs": {"Kind": {"type": "string", "enum": ["vop", "zuq"]}}}
TOOLS = ToolSet([{"type": "function", "function": {"name": "xar", "parameters": PARAMETERS}}], "Ubi tol 7 mip.")
RIGHT = {"kind": "zuq", "note": "tol 7", "count": 3}


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("xar", RIGHT, ""),
        ("other", RIGHT, "unknown tool"),
        ("xar", RIGHT | {"more": 1}, "wrong parameters"),
        ("xar", {"kind": "zuq"}, "wrong parameters"),
        ("xar", RIGHT | {"kind": "vopzuq"}, "not a choice"),
        ("xar", RIGHT | {"note": "tol 8"}, "not in the prompt"),
        ("xar", RIGHT | {"note": ""}, "not in the prompt"),
        ("xar", RIGHT | {"count": "3"}, "not an integer"),
    ],
)
def test_a_call_is_judged_by_its_tool_its_choices_and_the_prompt(name, arguments, expected):
    text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    assert fault(TOOLS, text)[0] == expected
    assert fault(TOOLS, text[:-14])[0] == "malformed"
    assert fault(TOOLS, "zuq")[0] == "no call"


def test_random_sets_of_tools_have_choices_references_and_texts():
    sets = [each for each, _ in zip(tool_sets(0), range(40), strict=False)]
    shown = json.dumps([each.tools for each in sets])
    assert shown == json.dumps([each.tools for each, _ in zip(tool_sets(0), range(40), strict=False)])
    assert all(word in shown for word in ('"enum"', '"$ref"', '"type": "string"}', '"integer"'))

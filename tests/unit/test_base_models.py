"""The shipped base models."""

import fnmatch
import json
import subprocess
import tomllib
from enum import StrEnum
from itertools import islice
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from benchmarks.unseen_tools import ENVIRONMENTS, prompt_of
from benchmarks.valid_calls import judge
from envs.tools import tool_specs
from tests.base_models.induction import write_induction_heads
from tests.base_models.make_tool_caller import HARD, SHARPNESS, SIZES, made_from, make_tool_tokenizer, rescale
from tests.base_models.small_model import render
from tests.base_models.tool_markup import TOOL_MARKUP, offered
from tests.base_models.tool_transcripts import conversations
from workers.cli import penstock
from workers.demo.base_models import FOLDERS, stored_hashes, write_base_model
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.format_detection import choose_tool_format

pytestmark = pytest.mark.models

ROOT = Path(__file__).parents[2]


def test_every_data_file_of_a_package_is_part_of_the_wheel():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = [f"{package}/{pattern}" for package, globs in table.items() for pattern in globs]
    listed = subprocess.run(
        ["git", "ls-files", *table], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    data = [name for name in listed if not name.endswith((".py", "README.md"))]
    assert any(name.startswith("workers/demo/models/calculator/") for name in data)
    assert [name for name in data if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder of the shipped `tool-caller`."""
    target = tmp_path_factory.mktemp("models") / "tool-caller"
    write_base_model("tool-caller", target)
    return target


def test_the_shipped_tool_caller_is_the_one_that_the_script_makes():
    expected = {name: value for name, value in made_from("").items() if name != "tokenizer"}
    stale = sorted(name for name, value in expected.items() if stored_hashes("tool-caller").get(name) != value)
    assert not stale, f"changed since the model was made: {stale}; run `python -m tests.base_models.make_tool_caller`"
    assert sum(path.stat().st_size for path in FOLDERS["tool-caller"].iterdir()) < 4_000_000


@pytest.mark.full
def test_the_tokenizer_of_the_tool_caller_is_the_one_that_the_script_trains():
    made = made_from(make_tool_tokenizer().backend_tokenizer.to_str(pretty=True))
    assert made["tokenizer"] == stored_hashes("tool-caller")["tokenizer"]


def test_base_model_writes_a_model_to_a_new_folder_only(tmp_path):
    made = CliRunner().invoke(penstock, ["base-model", str(tmp_path / "base")])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "base" / "model.safetensors").is_file()
    again = CliRunner().invoke(penstock, ["base-model", str(tmp_path / "base")])
    assert again.exit_code == 2, again.output
    assert "not empty" in again.output


def test_the_tool_caller_calls_tools_of_most_unseen_environments(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert sum(weight.numel() for weight in model.parameters()) < 1_200_000
    verdicts = {}
    for environment in [kind() for kind in ENVIRONMENTS[:5]]:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt_of(type(environment))}],
            tools=[spec.schema for spec in tool_specs(environment)],
            add_generation_prompt=True,
            return_tensors="pt",
        )["input_ids"]
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        verdicts[text] = judge(environment, text)[0]
    assert list(verdicts.values()).count("valid") == 5, verdicts


class Mood(StrEnum):
    """Pydantic describes it as a reference."""

    DRY = "dry"
    WET = "wet"


class Awkward:
    """Schemas that are no plain types."""

    def place(
        self, at: int | None, tags: list[str], box: dict[str, int], mood: Mood, note: dict[str, int] | None = None
    ) -> str:
        """Describe it at great length, which a small model need not read."""


def test_the_template_shows_tools_as_calls_and_conversations_continue(folder):
    tools = [spec.schema for spec in tool_specs(Awkward())]
    chat = ChatTokenizer.load(folder, {}, tools)
    prompt = chat.renderer.render_prompt(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Place it: 7."}]
    )
    shown = '<|assistant|><tool_call>{"name":"place","arguments":{"at":<|or|>"tags":[<|or|>"box":{},'
    shown += '"mood":"dry"}}</tool_call>'
    shown += '<|or|>"mood":"wet"}}</tool_call>'
    offered = '"Place<|or|>"it<|or|>7<|or|>'
    assert "".join(prompt.split()) == (
        f"<|system|>Bebrief.{shown}<|im_end|><|user|>Placeit:7.{offered}<|im_end|><|assistant|>"
    )
    assert choose_tool_format("auto", chat.renderer.template, tools).name == "hermes"
    check = chat.check_history(with_tools=True, with_user_replies=True)
    assert not check.rewrites_history, check.reason


def test_every_scripted_call_fits_the_schema_of_its_tool():
    for conversation in islice(conversations(3, HARD), 200):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools}
        for message in conversation.messages:
            for call in message.get("tool_calls", ()):
                schema, arguments = schemas[call["function"]["name"]], call["function"]["arguments"]
                assert set(arguments) == set(schema["properties"])
                assert all(fits(schema["properties"][name], value) for name, value in arguments.items()), call


def test_scripted_texts_and_numbers_are_those_that_the_template_offers_for_copying():
    contents = [
        *("Send 40 euros from alice to bob.", "486", "", " a\n b", '{"a": -5, "b": "x\\"y"}', "007 1e5 -0 12345678901"),
        *(" ".join(f"w{i} {i}" for i in range(40)), "x" * 40, "é 中🙂 [up] (down)"),
    ]
    for content in contents:
        message = {"role": "user", "content": content}
        [written] = render([[message]], TOOL_MARKUP.template, [{"function": {"name": "f"}}])
        shown = written.partition(f"<|user|>{content}")[2].split("<|im_end|>")[0].split("<|or|>")[:-1]
        words, numbers = offered(content)
        values = [json.loads(text.strip() + ('"' if '"' in text else "")) for text in shown]
        assert sorted(map(str, values)) == sorted([*words.values(), *numbers.values()]), content


def fits(schema: dict, value: object) -> bool:
    """Whether a value fits the part of JSON schema that the scripted conversations use."""
    if schema["type"] == "array":
        return isinstance(value, list) and all(fits(schema["items"], item) for item in value)
    if schema["type"] == "object":
        return value == {}
    kinds = {"integer": int, "number": (int, float), "string": str, "boolean": bool}
    proper = isinstance(value, kinds[schema["type"]]) and (schema["type"] == "boolean" or not isinstance(value, bool))
    return proper and value in schema.get("enum", [value])


def test_a_model_with_written_induction_heads_copies_without_training():
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=400, head_dim=32, tie_word_embeddings=True, **SIZES)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.02, generator=generator)
        write_induction_heads(model, 1)
        names = torch.randperm(400, generator=generator)[:60].view(10, 6)  # ten names of six tokens, each twice
        ids = torch.cat([names.flatten(), names[torch.randperm(10, generator=generator)].flatten()])[None]
        predicted = model(input_ids=ids).logits.argmax(-1)[0, :-1].reshape(-1)
    again = [place for place in range(61, 120) if place % 6]  # a name's first token is left to chance
    assert sum(int(predicted[place - 1] == ids[0, place]) for place in again) >= 0.8 * len(again)


def test_rescaled_matrices_leave_outputs_as_they_are_but_for_sharpness():
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=400, head_dim=32, tie_word_embeddings=True, **SIZES)).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        rescale(model)
        torch.testing.assert_close(model(input_ids=ids).logits, SHARPNESS * before, rtol=1e-2, atol=1e-2)

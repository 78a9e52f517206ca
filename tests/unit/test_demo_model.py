import json
import random
from itertools import islice

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from envs.builtin.calculator import Calculator
from envs.tools import tool_specs
from tests.base_models.demo_model import make_model
from tests.base_models.demo_transcripts import Behavior, build_transcript, transcripts
from tests.base_models.make_demo_model import made_from
from tests.base_models.warm_start import CONTEXT_WEIGHT, tokenize, warm_start
from workers.demo.base_models import FOLDERS, stored_hashes, write_base_model
from workers.demo.task import training_problems
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.history_check import check_history
from workers.rollout.tool_formats import TOOL_FORMATS

pytestmark = pytest.mark.models

TOOLS = [spec.schema for spec in tool_specs(Calculator())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "model"
    make_model(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def solved():
    """Six messages: user, call, result, call, result, answer."""
    return build_transcript(next(training_problems(3)), Behavior.CLEAN, random.Random(0))


def rendered(tokenizer, messages, **more):
    return tokenizer.apply_chat_template(messages, tokenize=False, **more)


def test_a_rendered_tool_call_is_parsed_by_the_hermes_format(tokenizer):
    function = {"name": "multiply", "arguments": {"a": 97, "b": 7}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    text = rendered(tokenizer, [{"role": "user", "content": "?"}, call])
    spelling = '<tool_call>{"name": "multiply", "arguments": {"a": 97, "b": 7}}</tool_call>'
    assert text == f"<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n{spelling}<|im_end|>\n"
    [parsed] = TOOL_FORMATS["hermes"].parse(spelling).calls
    assert (parsed.name, parsed.arguments) == ("multiply", {"a": 97, "b": 7})


def test_calls_render_the_same_with_text_arguments_and_without_a_wrapper(tokenizer, solved):
    def unwrapped(message):
        calls = [call["function"] for call in message.get("tool_calls", [])]
        calls = [{**call, "arguments": json.dumps(call["arguments"])} for call in calls]
        return {**message, "tool_calls": calls}

    assert rendered(tokenizer, [unwrapped(m) for m in solved]) == rendered(tokenizer, solved)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_prefix_of_a_conversation_renders_to_a_prefix_of_the_tokens(tokenizer, solved, tools, system):
    messages = [*system, *solved[:3], solved[2], *solved[3:]]  # two consecutive results as well
    whole = rendered(tokenizer, messages, tools=tools)
    for length in range(len(system) + 1, len(messages)):
        begun = rendered(tokenizer, messages[:length], tools=tools)
        assert whole.startswith(begun)
        if messages[length]["role"] == "assistant":
            opened = rendered(tokenizer, messages[:length], tools=tools, add_generation_prompt=True)
            assert opened == begun + "<|im_start|>assistant\n"
            assert whole.startswith(opened)


def test_schemas_are_rendered_unless_a_template_argument_omits_them(tokenizer, solved):
    bare = rendered(tokenizer, solved)
    shown = rendered(tokenizer, solved, tools=TOOLS)
    assert shown.startswith("<|im_start|>system\n# Tools")
    assert shown.endswith(bare)
    assert all(f'"name": "{name}"' in shown for name in ("add", "subtract", "multiply"))
    assert rendered(tokenizer, solved, tools=TOOLS, tool_schemas=False) == bare
    brief = [{"role": "system", "content": "Be brief."}, *solved]
    assert rendered(tokenizer, brief, tools=TOOLS).count("<|im_start|>system\nBe brief.\n\n# Tools") == 1
    assert rendered(tokenizer, brief) == "<|im_start|>system\nBe brief.<|im_end|>\n" + bare


def test_content_in_parts_renders_as_its_text(tokenizer):
    parts = [{"type": "text", "text": "Start "}, {"type": "text", "text": "with 50"}]
    assert rendered(tokenizer, [{"role": "user", "content": parts}]) == rendered(
        tokenizer, [{"role": "user", "content": "Start with 50"}]
    )


def test_tokenizers_and_transformers_agree(folder, tokenizer, solved):
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = rendered(tokenizer, solved)
    assert plain.encode(text).ids == tokenizer(text)["input_ids"] == plain.encode(text, add_special_tokens=False).ids
    assert plain.decode(plain.encode(text).ids, skip_special_tokens=False) == text


def test_every_digit_is_a_token_and_any_text_survives(tokenizer):
    for text in (" 8019", "8019", '": 8019,'):
        pieces = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
        assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("8019")
    strange = "Größe ±5 \t\n 数 🙂 \x00"
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange


def test_tool_call_tags_are_single_text_tokens_and_roles_are_control_tokens(tokenizer, solved):
    ids = tokenizer(rendered(tokenizer, solved))["input_ids"]
    for tag in (
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<|im_start|>",
        "<|im_end|>",
    ):
        assert len(tokenizer(tag)["input_ids"]) == 1
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text.count("<tool_call>{") == text.count("}</tool_call>") == 2
    assert "<|im_" not in text


def test_the_chat_tokenizer_continues_as_in_the_warm_start(folder, tokenizer, solved):
    chat = ChatTokenizer.load(folder, {}, None)
    assert not check_history(chat.renderer).rewrites_history
    assert chat.stop_token_ids == (tokenizer.eos_token_id,)
    [(ids, weights)] = tokenize(tokenizer, [solved])
    pieces = chat.prompt_ids(solved[:1])
    for place in (1, 3, 5):
        start = len(pieces)
        end = ids.index(tokenizer.eos_token_id, start) + 1
        assert set(weights[start:end]) == {1.0}, "the assistant's own tokens"
        pieces += ids[start:end]
        assert set(weights[end : end + 4]) == {CONTEXT_WEIGHT}
        if place < 5:
            pieces += chat.continuation_ids(solved[place + 1 : place + 2], ended_with_eos=True)
    assert pieces == ids[: len(pieces)]
    assert tokenizer.decode(ids[len(pieces) :]) == "\n"


def test_only_assistant_tokens_have_weight_1(tokenizer):
    for ids, weights in tokenize(tokenizer, list(islice(transcripts(9, habit=True), 50))):
        spoken = tokenizer.decode([token for token, weight in zip(ids, weights, strict=True) if weight == 1.0])
        assert spoken.endswith("<|im_end|>")
        assert "<|im_start|>" not in spoken
        assert "<tool_response>" not in spoken
        assert spoken.count("<|im_end|>") == rendered_turns(tokenizer, ids)


def rendered_turns(tokenizer, ids):
    return tokenizer.decode(ids).count("<|im_start|>assistant")


def test_the_model_is_small_and_tied_and_has_an_end_of_turn_token(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 400_000 < sum(weight.numel() for weight in model.parameters()) < 450_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.config.max_position_embeddings == 512


def test_the_seed_affects_only_the_weights(folder, tmp_path):
    make_model(tmp_path / "same", seed=1)
    make_model(tmp_path / "other", seed=2)
    weights = {name: (path / "model.safetensors").read_bytes() for name, path in tmp_folders(folder, tmp_path)}
    assert weights["first"] == weights["same"] != weights["other"]
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert len({(path / file).read_bytes() for _, path in tmp_folders(folder, tmp_path)}) == 1, file


def tmp_folders(folder, tmp_path):
    return [("first", folder), ("same", tmp_path / "same"), ("other", tmp_path / "other")]


def test_the_shipped_model_is_the_one_that_the_script_makes(folder, tmp_path):
    expected = made_from((folder / "tokenizer.json").read_text())
    stale = sorted(name for name, value in expected.items() if stored_hashes("calculator").get(name) != value)
    assert not stale, f"changed since the model was made: {stale}; run `python -m tests.base_models.make_demo_model`"
    write_base_model("calculator", tmp_path)
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes(), file
    for kind in (AutoConfig, GenerationConfig):
        made, shipped = (kind.from_pretrained(path).to_dict() for path in (folder, tmp_path))
        of_this_file = dict.fromkeys(("transformers_version", "_name_or_path"))
        assert made | of_this_file == shipped | of_this_file
    made, shipped = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in made.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in shipped.items()
    }
    assert sum(path.stat().st_size for path in FOLDERS["calculator"].iterdir()) < 1_000_000


def test_a_warm_start_is_reproducible_bit_for_bit_and_reports_each_step(tmp_path):
    seen = []
    results = []
    for name in ("one", "two"):
        make_model(tmp_path / name, seed=4)
        results.append(
            warm_start(
                tmp_path / name, 4, steps=6, batch=2, threads=1, progress=lambda *reported: seen.append(reported)
            )
        )
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    assert results[0] == results[1]
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6] * 2
    assert seen[:6] == seen[6:]
    assert results[0].loss < results[0].first_loss


def test_a_warm_start_of_one_step_is_refused(folder):
    with pytest.raises(ValueError, match="at least 2"):
        warm_start(folder, 1, steps=1)

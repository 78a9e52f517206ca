"""`penstock base-model --from FILE.gguf`: the same model, without quantization, or a refusal that says why."""

import sys

import gguf
import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stream.errors import SettingsError
from tests.cases.disks import skip_without_disk
from tests.cases.gguf_files import TEMPLATE, small_llama, write_gguf
from tests.cases.smollm2 import smollm2_gguf
from workers.cli import penstock
from workers.demo.gguf_models import write_gguf_model

PROMPT = torch.tensor([[1, 40, 41, 42, 43, 260, 9, 2]])


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "small.gguf")


def invoke(*arguments):
    return CliRunner().invoke(penstock, ["base-model", *map(str, arguments)])


@pytest.mark.parametrize("tied", [True, False])
def test_without_quantization_the_model_is_the_same_to_the_bit(tmp_path, tied):
    original = small_llama(tied=tied)
    report = write_gguf_model(write_gguf(tmp_path / "m.gguf", original), tmp_path / "out", "float32")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(made(PROMPT).logits, original(PROMPT).logits)
    assert made.config.tie_word_embeddings is tied
    assert made.config.rope_parameters["rope_theta"] == 12345.0
    assert (made.config.bos_token_id, made.config.eos_token_id, made.config.pad_token_id) == (1, 2, 0)
    assert report.undone == ""
    assert report.parameters == original.num_parameters()
    assert report.weight_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "BF16"])
def test_quantized_weights_are_those_that_ggufs_own_reader_computes(tmp_path, kind):
    file = write_gguf(tmp_path / "m.gguf", kind=kind)
    report = write_gguf_model(file, tmp_path / "out", "float32")
    made = load_file(tmp_path / "out" / "model.safetensors")
    stored = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(file).tensors}
    assert torch.equal(made["model.embed_tokens.weight"], stored["token_embd.weight"])
    assert torch.equal(made["model.layers.1.mlp.down_proj.weight"], stored["blk.1.ffn_down.weight"])
    assert torch.equal(made["model.layers.0.self_attn.v_proj.weight"], stored["blk.0.attn_v.weight"])
    assert report.undone == (f"{kind} in 15" if kind.startswith("Q") else "")
    assert report.tensors == {kind: 15, "F32": 5}


def test_the_folder_is_an_ordinary_model_in_bfloat16_that_can_be_trained(tmp_path):
    write_gguf_model(write_gguf(tmp_path / "m.gguf", kind="Q4_1"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert "quantization" not in (tmp_path / "out" / "config.json").read_text()
    model(PROMPT, labels=PROMPT).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_tokenizer_and_template_are_the_files(file, tmp_path):
    write_gguf_model(file, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("<|im_start|>hello hello<|im_end|>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "hello", "Ġ", "hello", "<|im_end|>"]
    assert tokenizer.decode(ids) == "<|im_start|>hello hello<|im_end|>"
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.model_max_length == 128


def test_files_beside_the_gguf_file_and_in_the_working_directory_are_not_taken_for_it(file, tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "other"}')
    (tmp_path / "chat_template.jinja").write_text("other")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("small.gguf", "model.gguf"):
        (elsewhere / name).write_bytes(b"GGUF of another kind")
    monkeypatch.chdir(elsewhere)
    write_gguf_model(file, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello")["input_ids"]) == ["hello"]


def test_smollms_digits_stand_alone_as_in_its_own_tokenizer(file, tmp_path):
    """Two spaces before a digit are one token there; with GPT-2's split the second would go with the digit."""
    report = write_gguf_model(file, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12")["input_ids"]) == ["a", "ĠĠ", "1", "2"]
    assert report.notes == []


def test_an_unknown_way_to_split_text_is_said(tmp_path):
    report = write_gguf_model(write_gguf(tmp_path / "m.gguf", split="strange-new"), tmp_path / "out")
    (note,) = report.notes
    assert "strange-new" in note


def test_a_file_without_a_chat_template_is_converted_and_said(tmp_path):
    report = write_gguf_model(write_gguf(tmp_path / "m.gguf", without="chat_template"), tmp_path / "out")
    assert not report.has_chat_template
    assert any("chat template" in note for note in report.notes)


def test_the_card_names_license_and_origin_and_nothing_that_the_file_made_up(tmp_path):
    url = "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct"
    file = write_gguf(
        tmp_path / "m.gguf",
        kind="Q8_0",
        general__name="My | <b>model</b>\n---\n",
        general__license="Apache-2.0",
        general__base_model__0__repo_url=url,
    )
    write_gguf_model(file, tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "apache-2.0"
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "<b>" not in card.text.replace("\\<", "")
    assert "Q8_0 in 15" in card.text


def test_the_command_says_what_was_undone_and_how_large_the_model_is(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", kind="Q4_1")
    made = invoke(tmp_path / "out", "--from", file)
    assert made.exit_code == 0, made.output
    assert "quantization undone: Q4_1 in 15 tensors; F32 in 5 tensors" in made.output
    assert "bfloat16" in made.output
    assert made.stdout == f"{tmp_path / 'out'}\n"


def test_a_folder_with_one_file_names_it(file, tmp_path):
    assert invoke(tmp_path / "out", "--from", file.parent).exit_code == 0
    write_gguf(tmp_path / "other.gguf")
    both = invoke(tmp_path / "out2", "--from", tmp_path)
    assert "other.gguf, small.gguf" in both.output


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("absent", None, "no such file"),
        ("a.gguf", b"PK\x03\x04zip", "not a GGUF file"),
        ("b.gguf", b"", "not a GGUF file"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path, name, content, why):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = invoke(tmp_path / "out", "--from", tmp_path / name)
    assert result.exit_code == 2
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert why in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_refused(file, tmp_path, share):
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(SettingsError, match="damaged or incomplete"):
        write_gguf_model(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"architecture": "rwkv7"}, "architecture 'rwkv7'"),
        ({"without": "tokenizer"}, "no tokenizer"),
        ({"without": "blk.1.ffn_up"}, "model.layers.1.mlp.up_proj.weight"),
        ({"split__count": 3}, "one of 3 parts"),
        ({"llama__rope__scaling__type": "yarn"}, "rotary positions"),
    ],
)
def test_what_transformers_would_read_wrongly_is_refused(tmp_path, change, why):
    file = write_gguf(tmp_path / "m.gguf", **change)
    with pytest.raises(SettingsError, match=why):
        write_gguf_model(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_folder_that_holds_something_is_left_alone(file, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(SettingsError, match="not empty"):
        write_gguf_model(file, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    assert invoke(tmp_path / "out", "--from", file).exit_code == 2


def test_too_little_room_is_known_before_anything_is_written(file, tmp_path, monkeypatch):
    monkeypatch.setattr("workers.demo.gguf_models.free_bytes", lambda _: 1 << 20)
    with pytest.raises(SettingsError, match="MB free"):
        write_gguf_model(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def disk(tmp_path):
    yield from skip_without_disk(tmp_path / "disk", "128k")


def test_a_disk_that_is_full_in_the_middle_is_named_and_left_empty(file, disk, monkeypatch):
    monkeypatch.setattr("workers.demo.gguf_models._check_room", lambda folder, needed: None)
    with pytest.raises(SettingsError, match="nothing was written"):
        write_gguf_model(file, disk / "out")
    assert list(disk.iterdir()) == []


def test_the_missing_package_is_named(file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SettingsError, match=r"penstock\[gguf\]"):
        write_gguf_model(file, tmp_path / "out")


@pytest.mark.parametrize("arguments", [("--name", "calculator"), ()])
def test_options_that_contradict_each_other_are_refused(file, tmp_path, arguments):
    more = ("--from", file, *arguments) if arguments else ("--dtype", "float32")
    assert invoke(tmp_path / "out", *more).exit_code == 2


@pytest.mark.full
@pytest.mark.timeout(600)
def test_smollm2_of_the_package_index_answers_as_a_language_model(tmp_path):
    report = write_gguf_model(smollm2_gguf(), tmp_path / "out")
    assert report.undone == "Q4_1 in 210, Q8_0 in 1"
    assert report.notes == []
    assert report.parameters == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(made[0, ids.shape[1] :])

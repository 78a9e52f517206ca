"""A model in shards trains as a whole one does, on the same ledger; and what several ranks keep, any number resumes."""

import os
import random
import shutil
import socket
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from stream.archive import Archive
from stream.codec import encode
from stream.ledger import Ledger, Line, content_hash
from stream.records import Completion, Group, Prompt, Row, Span
from stream.validity import Measured
from tests.ranks_on_a_ledger import Job, steps, work
from workers.settings.file import dump, parse
from workers.train.keeping.checkpoint import Checkpoints
from workers.train.model.logprobs import Readable, token_logprobs
from workers.train.step.learner import Learner

pytestmark = pytest.mark.timeout(240)

VOCABULARY, STEPS, KEPT = 43, 10, 5
RUNS = {
    "tied": {},
    "untied": {
        "estimator": {"name": "gae"},
        "algorithm": {"kl_coefficient": 0.05},
        "train": {"gradient_checkpointing": True, "packing": "on"},
    },
    "half": {"model": {"dtype": "bfloat16"}},
}
"""The second with a critic and a reference beside the policy, packed rows and layers computed again; the third in
bfloat16."""
SHORT = [("tied", "float64"), ("untied", "float64"), ("tied", "float32")]
LONG = [*SHORT, ("untied", "float32"), ("half", "float32")]


def group(number: int, version: int) -> Group:
    """Four completions of different lengths."""
    chance = random.Random(number)
    completions = []
    for index in range(4):
        tokens = [chance.randrange(1, VOCABULARY) for _ in range(chance.randrange(2, 12))]
        row = Row(
            prompt_ids=array("i", [1, 2]).tobytes(),
            token_ids=array("i", tokens).tobytes(),
            sampled=[(0, len(tokens))],
            logprobs=array("f", [chance.uniform(-4.5, -3) for _ in tokens]).tobytes(),
            spans=[Span(version, 0, len(tokens))],
        )
        completions.append(Completion(index=index, rows=[row], reward=Measured(chance.random())))
    return Group(prompt=Prompt(id=f"prompts:0:{number}", messages=[]), completions=completions)


def make_run(folder: Path, name: str) -> Path:
    """A model, and the books of a run of it: its settings' file, with ledger and archive beside it."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,  # no number of ranks divides it
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        tie_word_embeddings=name == "tied",
    )
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(5)
        Qwen3ForCausalLM(config).save_pretrained(folder / "base")
    table = {
        "run": {"folder": str(folder)},
        "data": {"path": "none"},
        "environments": {"a": "calculator"},
        "rollout": {"group_size": 4},
        "archive": {"keep": "all"},
        **RUNS[name],
    }
    train = {"learning_rate": 1e-2, "groups_per_step": 3, "micro_batch_tokens": 56, "weight_decay": 0.01}
    table["train"] = train | table.get("train", {})
    table["model"] = {"path": str(folder / "base"), **table.get("model", {})}
    (folder / "run.toml").write_text(dump(parse(table)))
    ledger, archive = Ledger(folder / "ledger.jsonl"), Archive(folder / "groups")
    for step in range(1, STEPS + 1):
        made = [group(number, step) for number in range(3 * step, 3 * step + 3)]
        lines = [Line(each.prompt.id, "trained", step, step, content_hash(each)) for each in made]
        archive.write((line, encode(each)) for line, each in zip(lines, made, strict=True))
        ledger.append(lines)
    ledger.close()
    archive.close()
    return folder / "run.toml"


def with_ranks(size: int, folder: Path, jobs: list[Job]) -> None:
    file = folder / f"jobs-{size}.json"
    file.write_bytes(msgspec.json.encode(jobs))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    told |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parents[1] / "ranks_on_a_ledger.py"
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(file)], env=os.environ | told | {"RANK": str(rank)})
        for rank in range(size)
    ]
    try:
        assert [process.wait(timeout=150) for process in ranks] == [0] * size
    finally:
        for process in ranks:
            process.kill()


def alone(settings, dtype):
    return Learner(settings, dtype=dtype)


class Results:
    """What learners ended with, by run, type and ranks; "3 on": resumed by three from what two had kept."""

    def __init__(self, folder: Path, kinds: list[tuple[str, str]]) -> None:
        self.folder = folder
        self.runs = {}
        for name in {name for name, _ in kinds}:
            (folder / name).mkdir()
            self.runs[name] = make_run(folder / name, name)
        with_ranks(2, folder, [self.job(*kind, "2", keep_at=KEPT) for kind in kinds])
        for kind in kinds:
            for on in ("1 on", "3 on"):
                shutil.copytree(self.kept(*kind, "2"), self.kept(*kind, on))
        with_ranks(3, folder, [self.job(*kind, "3 on") for kind in kinds])
        self.found = {}
        for kind in kinds:
            for ranks in ("2", "3 on"):
                self.found[*kind, ranks] = torch.load(self.job(*kind, ranks).result)
            for ranks in ("1", "1 on"):
                self.found[*kind, ranks] = work(self.job(*kind, ranks), alone)

    def kept(self, name: str, dtype: str, ranks: str) -> Path:
        return self.folder / name / f"checkpoints of {ranks} in {dtype}"

    def job(self, name: str, dtype: str, ranks: str, keep_at: int = 0) -> Job:
        return Job(
            settings=str(self.runs[name]),
            dtype=dtype,
            checkpoints=str(self.kept(name, dtype, ranks)),
            keep_at=keep_at,
            result=str(self.folder / f"{name} {dtype} {ranks}.pt"),
        )

    def logprobs(self, name: str, dtype: str, ranks: str) -> torch.Tensor:
        """Of every sampled token of the ledger, by what that learner ended with, computed in float64."""
        model = AutoModelForCausalLM.from_pretrained(self.folder / name / "base", dtype=torch.float64)
        ended = self.found[name, dtype, ranks]
        for own, parameter in model.named_parameters():
            parameter.data.copy_(ended.get(f"master.{own}", ended[f"weight.{own}"]))
        read, told = Readable(model, None), []
        with torch.no_grad():
            for _, _, groups in steps(self.folder / name):
                for row in (row for each in groups for completion in each.completions for row in completion.rows):
                    ids = torch.frombuffer(bytearray(row.prompt_ids + row.token_ids), dtype=torch.int32).long()
                    chosen = torch.arange(len(ids)) >= 2
                    told.append(token_logprobs(read, ids[None], chosen[None], temperature=1.0).logprobs_N)
        return torch.cat(told)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results(tmp_path_factory.mktemp("fsdp"), SHORT)


@pytest.fixture(scope="module")
def more_results(tmp_path_factory):
    return Results(tmp_path_factory.mktemp("fsdp"), LONG)


def largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((value.double() - other[name].double()).abs().max()) for name, value in one.items())


def loaded(results: Results, name: str, dtype: str) -> Any:
    """What two ranks kept, loaded by Transformers."""
    checkpoint = Checkpoints(results.kept(name, dtype, "2")).latest()
    assert checkpoint is not None
    assert checkpoint.progress.step == KEPT
    model, said = AutoModelForCausalLM.from_pretrained(checkpoint.model, dtype="auto", output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name != "untied")
    return model


@pytest.mark.parametrize("ranks", ["2", "1 on", "3 on"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_in_float64_ranks_end_with_what_one_process_ends_with(results, name, ranks):
    expected, found = results.found[name, "float64", "1"], results.found[name, "float64", ranks]
    begun = AutoModelForCausalLM.from_pretrained(results.folder / name / "base", dtype=torch.float64)
    for own, parameter in begun.named_parameters():
        assert (expected[f"master.{own}"] - parameter).abs().max() > 1e-3  # ten steps are a way
    assert largest(expected, found) < 1e-9
    apart = results.logprobs(name, "float64", "1") - results.logprobs(name, "float64", ranks)
    assert apart.abs().max() < 1e-9


@pytest.mark.parametrize("ranks", ["2", "1 on", "3 on"])
def test_in_float32_log_probs_agree(results, ranks):
    apart = results.logprobs("tied", "float32", "1") - results.logprobs("tied", "float32", ranks)
    assert apart.abs().max() < 1e-4


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_what_two_ranks_keep_is_a_model_that_transformers_loads(results, name):
    assert loaded(results, name, "float64").dtype == torch.float32


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["2", "1 on", "3 on"])
def test_in_float32_with_critic_and_reference_log_probs_agree(more_results, ranks):
    apart = more_results.logprobs("untied", "float32", "1") - more_results.logprobs("untied", "float32", ranks)
    assert apart.abs().max() < 1e-4


@pytest.mark.full
def test_in_bfloat16_they_are_as_near_as_its_rounding(more_results):
    """One process keeps the residual stream in float32, shards in bfloat16."""
    apart = more_results.logprobs("half", "float32", "1") - more_results.logprobs("half", "float32", "2")
    assert apart.abs().mean() < 0.05
    assert loaded(more_results, "half", "float32").dtype == torch.bfloat16


@pytest.mark.full
def test_the_same_number_of_ranks_gives_the_same_weights_to_the_bit(more_results):
    again = more_results.job("tied", "float32", "2 again")
    with_ranks(2, more_results.folder, [again])
    assert largest(more_results.found["tied", "float32", "2"], torch.load(again.result)) == 0.0

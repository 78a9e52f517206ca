"""A sharded model trains like a whole one on the same ledger; any number of ranks resumes a checkpoint of several."""

from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from stream.codec import encode
from stream.records import Group
from stream.trainer.archive import Archive
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import LedgerRecord, Trained, content_hash
from tests.cases.groups import random_group
from tests.cases.models import write_small_qwen3
from tests.cases.norms import exact_norms
from tests.cases.ports import free_port
from tests.cases.ranks import run_ranks
from tests.ranks_on_a_ledger import Crew, Job, steps, work
from workers.settings.toml_file import dump_settings, parse_settings
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.model.logprobs import LogprobModel, token_logprobs
from workers.train.step.learner import Learner

pytestmark = [pytest.mark.models, pytest.mark.timeout(240), pytest.mark.usefixtures("preloaded")]

STEPS, KEPT = 10, 5
VOCABULARY = 43
"""Not divisible by any number of ranks."""
ENDS = [41, 42]
"""Tokens that end a turn; only the generation configuration lists them."""
RUNS = {
    "tied": {},
    "untied": {
        "estimator": {"name": "gae"},
        "algorithm": {"kl_coefficient": 0.05},
        "train": {"gradient_checkpointing": True, "packing": "on"},
    },
    "adapter": {
        "lora": {"rank": 4, "alpha": 8.0},
        "algorithm": {"kl_coefficient": 0.05},
        "train": {"gradient_checkpointing": True},
    },
    "half": {"model": {"dtype": "bfloat16"}},
    "half adapter": {"model": {"dtype": "bfloat16"}, "lora": {"rank": 4, "alpha": 8.0}},
}
"""Sections of the settings by run; all runs share history.

`untied` has a critic and a reference beside the policy, packed rows and recomputed layers; the reference of `adapter`
is the policy without its adapter.
"""
SHORT = [("tied", "float64")]
LONG = [("untied", "float64"), ("adapter", "float64"), *((name, "float32") for name in RUNS)]
OTHERS = ("2", "1 on", "3 on")


def group(number: int, version: int) -> Group:
    return random_group(number, version, vocabulary=VOCABULARY, rewards=(0.9, 0.1, 0.4, 0.7))


def make_run(folder: Path, name: str) -> Path:
    """Make a model and the records of a run: its settings file, with ledger and archive beside it."""
    write_small_qwen3(folder / "base", VOCABULARY, layers=2, tied=name == "tied")
    GenerationConfig(eos_token_id=ENDS).save_pretrained(folder / "base")
    table = {
        "run": {"folder": str(folder)},
        "data": {"path": "none"},
        "environments": {"a": "calculator"},
        "rollout": {"group_size": 4},
        "archive": {"keep": "all"},
        **RUNS[name],
    }
    train = {"learning_rate": 1e-2, "batch_size": 3, "micro_batch_tokens": 56, "weight_decay": 0.01}
    train["share_history"] = "on"
    table["train"] = train | table.get("train", {})
    table["model"] = {"path": str(folder / "base"), **table.get("model", {})}
    (folder / "run.toml").write_text(dump_settings(parse_settings(table)))
    table["train"]["share_history"] = "off"
    (folder / "apart.toml").write_text(dump_settings(parse_settings(table)))
    ledger, archive = Ledger(folder / "ledger.jsonl"), Archive(folder / "groups")
    for step in range(1, STEPS + 1):
        made = [group(number, step) for number in range(3 * step, 3 * step + 3)]
        lines = [LedgerRecord(each.prompt.id, Trained(), step, step, content_hash(each), in_step=True) for each in made]
        archive.write((line, encode(each)) for line, each in zip(lines, made, strict=True))
        ledger.append(lines)
    ledger.close()
    archive.close()
    return folder / "run.toml"


def let_work(folder: Path, crews: list[Crew]) -> None:
    (folder / "crews.json").write_bytes(msgspec.json.encode(crews))
    run_ranks("ranks_on_a_ledger.py", str(folder / "crews.json"))


def crew(size: int, jobs: list[Job]) -> Crew:
    return Crew(size=size, port=free_port(), jobs=jobs)


def alone(settings, dtype):
    return Learner(settings, dtype=dtype)


@pytest.fixture(scope="module", autouse=True)
def norms_in_float64():
    """As in the processes of the ranks."""
    with pytest.MonkeyPatch.context() as patch:
        exact_norms(patch.setattr)
        yield


class Results:
    """Final state of learners, by run, type and ranks.

    "3 on": three ranks resumed from a checkpoint of two; "apart": one process whose rows share nothing.
    """

    def __init__(self, folder: Path, kinds: list[tuple[str, str]]) -> None:
        self.folder, self.kinds = folder, kinds
        self.runs = {}
        for name in {name for name, _ in kinds}:
            (folder / name).mkdir()
            self.runs[name] = make_run(folder / name, name)
        two, three = ([self.job(*kind, ranks) for kind in kinds] for ranks in ("2", "3 on"))
        let_work(folder, [crew(2, two), crew(3, three)])
        self.found = {}
        for kind in kinds:
            for ranks in ("2", "3 on"):
                self.found[*kind, ranks] = torch.load(self.job(*kind, ranks).result)
            for ranks in ("1", "1 on", *(["apart"] if kind[1] == "float64" else [])):
                self.found[*kind, ranks] = work(self.job(*kind, ranks), alone)

    def kept(self, name: str, dtype: str) -> Path:
        """Return the folder of the checkpoints that two ranks saved."""
        return self.folder / name / f"checkpoints in {dtype}"

    def job(self, name: str, dtype: str, ranks: str) -> Job:
        return Job(
            settings=str(self.runs[name].with_name("apart.toml") if ranks == "apart" else self.runs[name]),
            dtype=dtype,
            resume=str(self.kept(name, dtype)) if ranks.endswith("on") else "",
            keep=str(self.kept(name, dtype)),
            keep_at=KEPT if ranks == "2" else 0,
            result=str(self.folder / f"{name} {dtype} {ranks}.pt"),
        )

    def apart(self, name: str, dtype: str, ranks: str) -> float:
        """Return the largest difference of a log-prob from the result of one process."""
        result, expected = (self.logprobs(name, dtype, which) for which in (ranks, "1"))
        return float((result - expected).abs().max())

    def logprobs(self, name: str, dtype: str, ranks: str) -> torch.Tensor:
        """Return log-probs of every sampled token in the ledger under a learner's final weights, in float64."""
        model = AutoModelForCausalLM.from_pretrained(self.folder / name / "base", dtype=torch.float64)
        ended = self.found[name, dtype, ranks]
        for own, parameter in model.named_parameters():
            parameter.data.copy_(ended.get(f"master.{own}", ended[f"weight.{own}"]))
        read, logprobs_of_rows = LogprobModel(model, None), []
        with torch.no_grad():
            for _, _, groups in steps(self.folder / name):
                for row in (row for each in groups for completion in each.completions for row in completion.rows):
                    ids = torch.frombuffer(bytearray(row.prompt_ids + row.token_ids), dtype=torch.int32).long()
                    chosen = torch.arange(len(ids)) >= 2
                    logprobs_of_rows.append(token_logprobs(read, ids[None], chosen[None], temperature=1.0).logprobs_N)
        return torch.cat(logprobs_of_rows)


def largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((value.double() - other[name].double()).abs().max()) for name, value in one.items())


def loaded(results: Results, name: str, dtype: str) -> Any:
    """Load a checkpoint of two ranks with Transformers."""
    checkpoint = CheckpointStore(results.kept(name, dtype)).latest()
    assert checkpoint is not None
    assert checkpoint.progress.step == KEPT
    model, loading_info = AutoModelForCausalLM.from_pretrained(checkpoint.model, dtype="auto", output_loading_info=True)
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    assert model.generation_config.eos_token_id == ENDS
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "tied")
    return model


def moved(results: Results, name: str, dtype: str) -> float:
    """Return the smallest change of a weight over ten steps."""
    begun = AutoModelForCausalLM.from_pretrained(results.folder / name / "base", dtype=torch.float64)
    ended = results.found[name, dtype, "1"]
    ways = {own: float((ended[f"weight.{own}"] - p.detach()).abs().max()) for own, p in begun.named_parameters()}
    if name == "adapter":
        ways = {own: way for own, way in ways.items() if own.endswith("proj.weight")}
    return min(ways.values())


def all_equal_in_float64(results: Results, name: str) -> None:
    assert moved(results, name, "float64") > 1e-3  # ten steps change all weights
    expected = results.found[name, "float64", "1"]
    apart = {ranks: largest(expected, results.found[name, "float64", ranks]) for ranks in (*OTHERS, "apart")}
    assert max(apart.values()) < 1e-9, apart


def test_ranks_match_one_process_and_any_number_resumes(tmp_path):
    results = Results(tmp_path, SHORT)
    all_equal_in_float64(results, "tied")
    assert loaded(results, "tied", "float64").dtype == torch.float32


@pytest.fixture(scope="module")
def more_results(tmp_path_factory):
    return Results(tmp_path_factory.mktemp("fsdp"), LONG)


@pytest.mark.full
def test_ranks_with_critic_reference_and_packing_match_one_process(more_results):
    all_equal_in_float64(more_results, "untied")
    all_equal_in_float64(more_results, "adapter")
    assert loaded(more_results, "untied", "float64").dtype == torch.float32


@pytest.mark.full
def test_four_ranks_that_share_history_match_one_process_with_rows_apart(more_results):
    jobs = {name: more_results.job(name, "float64", "4") for name in ("untied", "adapter")}
    let_work(more_results.folder, [crew(4, [*jobs.values()])])
    for name, job in jobs.items():
        assert largest(more_results.found[name, "float64", "apart"], torch.load(job.result)) < 1e-9, name


@pytest.mark.full
@pytest.mark.parametrize("ranks", OTHERS)
@pytest.mark.parametrize("name", ["tied", "untied", "adapter"])
def test_log_probs_of_ranks_agree_in_float32(more_results, name, ranks):
    assert more_results.apart(name, "float32", ranks) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("name", ["half", "half adapter"])
def test_ranks_agree_in_bfloat16_up_to_rounding(more_results, name):
    """One process keeps the residual stream of a whole model in float32; shards keep it in bfloat16."""
    apart = more_results.logprobs(name, "float32", "1") - more_results.logprobs(name, "float32", "2")
    assert apart.abs().mean() < 0.05
    if name == "half":
        assert loaded(more_results, name, "float32").dtype == torch.bfloat16


@pytest.mark.full
def test_an_adapter_saved_by_two_ranks_loads_in_peft(more_results):
    checkpoint = CheckpointStore(more_results.kept("adapter", "float32")).latest()
    base = AutoModelForCausalLM.from_pretrained(more_results.folder / "adapter" / "base", dtype=torch.float32)
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):  # peft looks it up under its old name
        model = peft.PeftModel.from_pretrained(base, checkpoint.model)
    layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    assert len(layers) == 2 * 7
    assert all(layer.get_delta_weight("default").abs().max() > 0 for layer in layers)


@pytest.mark.full
@pytest.mark.parametrize("name", ["tied", "adapter"])
def test_the_same_number_of_ranks_gives_equal_bits(more_results, name):
    again = more_results.job(name, "float32", "2 again")
    let_work(more_results.folder, [crew(2, [again])])
    assert largest(more_results.found[name, "float32", "2"], torch.load(again.result)) == 0.0

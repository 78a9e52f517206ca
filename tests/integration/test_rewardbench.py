"""`penstock rewardbench`: accuracy by subset, compared with transformers; unscored pairs count separately."""

import json
import random
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from anyio.from_thread import start_blocking_portal
from click.testing import CliRunner

from examples.reward_model.make_models import make_reward_model
from stream.errors import DataError
from stream.validity import Measured
from tests.integration.test_pooling_engine import serving
from tests.reward_server import reward_server
from workers.cli import penstock
from workers.evaluate.rewardbench import SECTIONS, PreferencePair, read_pairs, summarize
from workers.local_engine.pooling.classifier import ReferenceClassifier

pytestmark = pytest.mark.models

SUBSETS = [subset for subsets in SECTIONS.values() for subset in subsets]


@contextmanager
def in_a_thread(server):
    """Keep an asynchronous server running while the command runs another event loop."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(server) as running:
        yield running


def rows(per_subset: int) -> list[dict]:
    draw = random.Random(1)
    text = lambda: " ".join(str(draw.randrange(100)) for _ in range(draw.choice([1, 5, 40])))  # noqa: E731
    return [
        {"id": f"{subset}-{i}", "prompt": text(), "chosen": text(), "rejected": text(), "subset": subset}
        for subset in SUBSETS
        for i in range(per_subset)
    ]


def write(path, table: list[dict]):
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return path


def test_the_23_subsets_are_in_rewardbenchs_four_sections():
    assert len(SUBSETS) == len(set(SUBSETS)) == 23
    assert (SUBSETS[0], [len(subsets) for subsets in SECTIONS.values()]) == ("alpacaeval-easy", [5, 6, 5, 7])
    assert "xstest-should-respond" in SECTIONS["Safety"]
    assert SECTIONS["Reasoning"]["math-prm"] == sum(n for name, n in SECTIONS["Reasoning"].items() if "hep" in name)


def test_every_subset_is_compared_with_the_reference(tmp_path):
    make_reward_model(tmp_path / "model", seed=2)
    table = rows(2)
    file = write(tmp_path / "bench.jsonl", table)
    arguments = ["rewardbench", str(file), "--reference", str(tmp_path / "model")]
    with in_a_thread(serving(tmp_path / "model")) as ask:
        completed = CliRunner().invoke(penstock, [*arguments, "--url", ask.url, "--json"])
        shown = CliRunner().invoke(penstock, [*arguments, "--url", ask.url])
    assert completed.exit_code == shown.exit_code == 0, completed.output
    report = json.loads(completed.stdout)
    plain = ReferenceClassifier(tmp_path / "model")
    won = {}
    for row, pair in zip(table, report["pairs"], strict=True):
        user = {"role": "user", "content": row["prompt"]}
        scores = [plain.score([user, {"role": "assistant", "content": row[which]}]) for which in ("chosen", "rejected")]
        assert pair["id"] == row["id"]
        assert pair["reference"] == scores
        assert [pair["chosen"]["value"], pair["rejected"]["value"]] == pytest.approx(scores, abs=1e-4)
        won.setdefault(row["subset"], []).append(scores[0] > scores[1])
    assert [s["subset"] for s in report["subsets"]] == SUBSETS
    for subset in report["subsets"]:
        expected = sum(won[subset["subset"]]) / 2
        assert subset["accuracy"] == subset["reference"] == pytest.approx(expected)
        assert (subset["pairs"], subset["agreeing"], subset["unscored"]) == (2, 2, 0)
    assert report["sections"] == report["reference_sections"]
    assert 0 < report["largest_difference"] < 1e-4
    assert len({subset["accuracy"] for subset in report["subsets"]}) > 2  # so that a wrong assignment would show
    assert all(name in shown.stdout for name in (*SUBSETS, *SECTIONS, "reference", "agreeing"))


def test_unscored_pairs_are_counted_separately_and_a_tie_is_wrong(tmp_path):
    table = [
        {"prompt": "p", "chosen": "longer", "rejected": "short", "subset": "hep-go"},
        {"prompt": "p", "chosen": "s", "rejected": "longer", "subset": "hep-go"},
        {"prompt": "p", "chosen": "same", "rejected": "same", "subset": "hep-go"},
        {"prompt": "p", "chosen": "too long", "rejected": "short", "subset": "hep-go"},
        {"prompt": "p", "chosen": "longer", "rejected": "too long", "subset": "of my own"},
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "bench.parquet")
    with in_a_thread(reward_server()) as server:
        server.fault = lambda _, messages: 400 if messages[-1]["content"] == "too long" else None
        completed = CliRunner().invoke(
            penstock, ["rewardbench", str(tmp_path / "bench.parquet"), "--url", server.url, "--json"]
        )
        shown = CliRunner().invoke(penstock, ["rewardbench", str(tmp_path / "bench.parquet"), "--url", server.url])
    assert completed.exit_code == shown.exit_code == 1
    report = json.loads(completed.stdout)
    go, own = report["subsets"]
    assert (go["subset"], go["pairs"], go["unscored"], go["accuracy"]) == ("hep-go", 4, 1, pytest.approx(1 / 3))
    assert (own["section"], own["accuracy"], own["unscored"]) == ("other", None, 1)
    assert report["sections"] == {
        "Chat": None,
        "Chat Hard": None,
        "Safety": None,
        "Reasoning": pytest.approx(1 / 3),
    }
    assert report["pairs"][3]["chosen"]["reason"] == "raised"
    assert "unscored: 3, chosen: raised" in shown.stdout


def test_a_section_weighs_its_subsets_as_rewardbench_does():
    def pairs(subset: str, *won: bool) -> list[PreferencePair]:
        return [
            PreferencePair(id=str(i), subset=subset, chosen=Measured(float(w)), rejected=Measured(0.5), is_correct=w)
            for i, w in enumerate(won)
        ]

    report = summarize("f", [*pairs("math-prm", True, True), *pairs("hep-cpp", False), *pairs("hep-go", True, False)])
    assert report.sections["Reasoning"] == pytest.approx((984 * 1 + 164 * 0 + 164 * 0.5) / (984 + 164 + 164))


@pytest.mark.parametrize("missing", ["prompt", "chosen", "rejected", "subset"])
def test_a_row_without_a_column_is_named(tmp_path, missing):
    row = {"prompt": "p", "chosen": "c", "rejected": "r", "subset": "hep-go"}
    file = write(tmp_path / "bench.jsonl", [row, {name: value for name, value in row.items() if name != missing}])
    with pytest.raises(DataError, match=f"(row 1|:2).*{missing}"):
        read_pairs(file)

"""`penstock rescore` scores archived groups on their snapshots and does not change the run."""

import hashlib
import json

import pytest
from click.testing import CliRunner

from envs.factory import EnvironmentFactory
from envs.snapshot import freeze
from stream.codec import encode
from stream.records import Completion, Failure, Group, Prompt, RewardPart
from stream.trainer.archive import Archive
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import Dropped, LedgerOutcome, LedgerRecord, Trained, content_hash
from stream.validity import Measured, RewardReason, RolloutReason, Unmeasured
from tests.cases.run_folders import write_run
from workers.cli import penstock
from workers.evaluate.rescore import RewardComparison, correlation, order_agreement, summarize

TRAINED = Trained()

WORLD = '''
class Till:
    """An environment that remembers what was rung up."""

    def reset(self, **row):
        self.receipts = []

    def ring(self, amount: int) -> int:
        """Ring something up.

        Args:
            amount: How much.
        """
        self.receipts.append(amount)
        return amount


def total(environments, **columns):
    return [float(sum(till.receipts)) for till in environments]


def picky(environments, limit, **columns):
    return [None if sum(till.receipts) > limit else 1.0 for till in environments]


def broken(completions, **columns):
    raise RuntimeError("the grader crashed")
'''


class Run:
    """Make a finished run: settings, ledger, archive."""

    def __init__(self, folder) -> None:
        self.world = folder / "world.py"
        self.world.write_text(WORLD)
        environments = f'till = "{self.world}:Till"'
        self.folder = write_run(folder / "run", environments=environments, reward=f"{self.world}:total")
        self.factory = EnvironmentFactory.load(f"{self.world}:Till")
        self.ledger = Ledger(self.folder / "ledger.jsonl")
        self.archive = Archive(self.folder / "groups")

    def completion(self, index: int, *receipts: int, old: float | None = None) -> Completion:
        env = self.factory.make()
        env.reset()
        for amount in receipts:
            env.ring(amount)
        reward = Unmeasured(RewardReason.TIMEOUT, "slow") if old is None else Measured(old)
        return Completion(
            index=index,
            messages=[{"role": "assistant", "content": str(receipts)}],
            snapshot=freeze(env, 1_000_000),
            parts=[RewardPart(name="env", reward=Measured(10.0)), RewardPart(name="total", reward=reward)],
            reward=reward,
        )

    def ended(
        self, name: str, *completions: Completion, outcome: LedgerOutcome = TRAINED, archived: bool = True
    ) -> None:
        group = Group(
            prompt=Prompt(id=name, messages=[{"role": "user", "content": "u"}], environment="till"),
            completions=list(completions),
        )
        line = LedgerRecord(name, outcome, 1, 0, content_hash(group))
        self.ledger.append([line])
        if archived:
            self.archive.write([(line, encode(group))])

    def digest(self) -> dict[str, str]:
        files = [p for p in self.folder.rglob("*") if p.is_file() and "rescored" not in p.parts]
        return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    made.ended("a", made.completion(0, 1, 2, old=0.0), made.completion(1, 5, old=1.0))
    made.ended("b", made.completion(0, 7, old=2.0), made.completion(1, old=None), outcome=Dropped("zero_variance"))
    made.ended("gone", made.completion(0, old=1.0), archived=False)
    failed = Completion(index=1, failure=Failure(reason=RolloutReason.ENGINE))
    made.ended("c", made.completion(0, 100, old=3.0), failed)
    made.ledger.close()
    made.archive.close()
    return made


def rescore(*arguments: str):
    result = CliRunner().invoke(penstock, ["rescore", *arguments])
    return result, (json.loads(result.stdout) if result.exit_code == 0 and "--json" in arguments else None)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def test_every_archived_completion_is_scored_on_its_snapshot_and_the_run_is_unchanged(run):
    before = run.digest()
    result, report = rescore(str(run.folder), "--reward", f"{run.world}:total", "--json")
    assert result.exit_code == 0, result.output
    assert run.digest() == before
    actual = lines(run.folder / "rescored" / "rescored")
    assert [(f["prompt"], f["completion"], f["outcome"]) for f in actual] == [
        *(("a", 0, "trained"), ("a", 1, "trained")),
        *(("b", 0, "dropped:zero_variance"), ("b", 1, "dropped:zero_variance")),
        *(("c", 0, "trained"), ("c", 1, "trained")),
    ]
    totals = [3.0, 5.0, 7.0, 0.0, 100.0]
    assert [f["new"]["value"] for f in actual if f["new"]] == [10.0 + total for total in totals]  # env's part is kept
    assert [part["name"] for part in actual[0]["new_parts"]] == ["env", "total"]
    assert actual[3]["old"] == {"type": "unmeasured", "reason": "timeout", "detail": "slow"}
    assert actual[5]["new"] is None  # the completion failed
    assert actual[0]["messages"] == [{"role": "assistant", "content": "(1, 2)"}]
    assert (report["groups"], report["missing"]) == (3, 1)
    assert report["validity"] == {"measured": 4, "timeout -> measured": 1}
    (till,) = report["environments"]
    assert (till["environment"], till["completions"], till["both_measured"]) == ("till", 5, 4)
    assert (till["old_mean"], till["new_mean"]) == (1.5, pytest.approx(10 + (3 + 5 + 7 + 100) / 4))
    assert till["order_agreement"] == 1.0


def test_functions_from_a_file_have_weights_and_args(run, tmp_path):
    file = tmp_path / "other.toml"
    file.write_text(
        f'[[rewards]]\nref = "{run.world}:picky"\nweight = 2.0\nargs = {{ limit = 6 }}\n'
        f'[[rewards]]\nref = "{run.world}:total"\nname = "sum"\n'
    )
    result, report = rescore(str(run.folder), "--rewards", str(file), "--json")
    assert result.exit_code == 0, result.output
    actual = lines(run.folder / "rescored" / "other")
    assert actual[0]["new"]["value"] == 10.0 + 2.0 + 3.0
    assert actual[2]["new"]["reason"] == "component"
    assert [part["reward"].get("reason") for part in actual[2]["new_parts"]] == [None, "missing", None]
    assert report["validity"] == {"measured -> component": 2, "measured": 2, "timeout -> measured": 1}


def test_a_failing_function_gives_reasons_and_a_complete_summary(run):
    result, _ = rescore(str(run.folder), "--reward", f"{run.world}:broken", "--name", "broken")
    assert result.exit_code == 0, result.output
    assert "measured -> component: 4" in result.stdout
    assert "1 more are not archived" in result.stdout


@pytest.mark.parametrize("name", ["../../elsewhere", "..", "a/b", "/elsewhere"])
def test_the_name_of_a_comparison_does_not_lead_elsewhere(run, name):
    result, _ = rescore(str(run.folder), "--reward", f"{run.world}:total", "--name", name)
    assert result.exit_code == 2
    assert "use --out for another folder" in result.stderr
    assert not (run.folder / "rescored").exists()


def test_a_comparison_is_never_overwritten_and_may_have_another_folder(run, tmp_path):
    reward = ("--reward", f"{run.world}:total")
    assert rescore(str(run.folder), *reward, "--out", str(tmp_path / "elsewhere"))[0].exit_code == 0
    assert len(lines(tmp_path / "elsewhere")) == 6
    assert not (run.folder / "rescored").exists()
    again, _ = rescore(str(run.folder), *reward, "--out", str(tmp_path / "elsewhere"))
    assert again.exit_code == 1
    assert "exists already" in again.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "give either --rewards FILE or --reward REF"),
        (["--reward", "nobody"], 1, "nobody"),
        (["--rewards", "{file}"], 2, "nothing to score with"),
        (["--rewards", "{wrong}"], 2, "unknown key rewrds"),
        (["--rewards", "{bad}"], 2, "unknown key rewards[0].weigth"),
    ],
    ids=["nothing", "unknown", "empty", "misspelt", "field"],
)
def test_invalid_reward_functions_are_refused_and_nothing_is_written(run, tmp_path, arguments, code, words):
    for name, text in (("file", ""), ("wrong", "[[rewrds]]\n"), ("bad", '[[rewards]]\nref = "x"\nweigth = 1\n')):
        (tmp_path / f"{name}.toml").write_text(text)
    paths = {name: str(tmp_path / f"{name}.toml") for name in ("file", "wrong", "bad")}
    result, _ = rescore(str(run.folder), *(argument.format(**paths) for argument in arguments))
    assert (result.exit_code, words in result.output) == (code, True), result.output
    assert not (run.folder / "rescored").exists()


def test_a_run_without_an_archive_says_so(tmp_path):
    made = Run(tmp_path)
    made.ended("a", made.completion(0, old=1.0), archived=False)
    made.ledger.close()
    result, _ = rescore(str(made.folder), "--reward", f"{made.world}:total")
    assert result.exit_code == 1
    assert "archive.keep" in result.output
    assert list((made.folder / "rescored").iterdir()) == []


def test_order_is_compared_within_groups_only():
    kept = [("a", 0.0, 5.0), ("a", 1.0, 6.0), ("b", 0.0, 100.0), ("b", 1.0, 101.0)]
    assert order_agreement(kept) == 1.0
    assert order_agreement([("a", 0.0, 6.0), ("a", 1.0, 5.0)]) == 0.0
    assert order_agreement([("a", 0.0, 5.0), ("a", 1.0, 5.0)]) == 0.5
    assert order_agreement([("a", 1.0, 5.0), ("a", 1.0, 6.0), ("b", 0.0, 1.0)]) is None


def test_correlation_is_pearsons_and_none_for_constant_values():
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert correlation([1, 2, 3], [1, 0, 1]) == pytest.approx(0)
    assert correlation([1, 2, 4], [3, 1, 0]) == pytest.approx(-0.9286, abs=1e-3)
    assert correlation([0.1] * 5, [1, 2, 3, 4, 5]) is None
    assert correlation([1], [1]) is None


def test_environments_are_summarized_separately_and_together():
    comparisons = [
        RewardComparison("a", "x", Measured(1.0), Measured(3.0)),
        RewardComparison("b", "y", Measured(2.0), Unmeasured(RewardReason.RAISED)),
        RewardComparison("b", "y", None, Measured(5.0)),
    ]
    summary = summarize(comparisons, groups=2, missing=0)
    assert [(e.environment, e.completions, e.both_measured) for e in summary.environments] == [
        ("all", 3, 1),
        ("x", 1, 1),
        ("y", 2, 0),
    ]
    assert summary.validity == {"measured": 1, "measured -> raised": 1, "not scored -> measured": 1}

"""reasoning-gym's data sets as environments, scored as its own scorer does."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.adapters import reasoning_gym_tasks
from envs.factory import EnvironmentFactory
from envs.sandboxes.pools.isolation import Isolation
from envs.sandboxes.pools.shared_pools import run_in_pool
from stream.errors import ReferenceNotFoundError
from stream.validity import Measured, RewardReason
from tests.cases.sandboxes import needs_sandbox  # noqa: F401  (a fixture)
from workers.check.scripted import play

reasoning_gym = pytest.importorskip("reasoning_gym", reason='needs pip install "penstock[reasoning-gym]"')
ReasoningGym, extract_answer = reasoning_gym_tasks.ReasoningGym, reasoning_gym_tasks.extract_answer
REF = "envs.adapters.reasoning_gym_tasks:ReasoningGym"
NOSY = str(Path(__file__).parents[1])
DATASETS = (
    "basic_arithmetic", "chain_sum", "countdown", "gcd", "leg_counting", "letter_counting", "mini_sudoku",
    "prime_factorization", "spell_backward", "word_sorting",
)  # fmt: skip


def own_score(dataset, answer, entry):
    """Return the score; some of reasoning-gym's scorers raise on answers that are not numbers."""
    try:
        return float(dataset.score_answer(answer, entry))
    except ValueError:
        return 0.0


@pytest.mark.full
@pytest.mark.parametrize("name", DATASETS)
def test_rewards_equal_those_of_its_own_scorer(name):
    for seed in range(5):
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=1)
        entry = dataset[0]
        answers = [entry["answer"], f" {entry['answer']} ", f"{entry['answer']}0", "7", "nothing of the kind", ""]
        for answer in answers:
            text = f"I think.\n<answer>{answer}</answer>"
            played = play(REF, [text], args={"dataset": name}, seed=seed)
            assert played.messages[1]["content"] == entry["question"]
            assert played.reward_value == own_score(dataset, reasoning_gym.utils.extract_answer(text), entry)
            assert isinstance(played.reward, Measured)
            assert played.environment.entry["question"] == entry["question"]
        untagged = play(REF, [entry["answer"]], args={"dataset": name}, seed=seed)
        assert untagged.reward_value == dataset.score_answer(None, entry)


def test_a_composite_makes_problems_of_several_data_sets():
    """As settings can write it: tables, with the library's defaults for weight and config."""
    datasets = [{"name": "chain_sum", "weight": 2, "config": {"min_terms": 2, "max_terms": 2}}, {"name": "gcd"}]
    args = {"dataset": "composite", "config": {"datasets": datasets}}
    sources = set()
    for seed in range(12):
        entry = play(REF, [""], args=args, seed=seed).environment.entry
        sources.add(entry["metadata"]["source_dataset"])
        right = play(REF, [f"<answer>{entry['answer']}</answer>"], args=args, seed=seed)
        assert right.messages[1]["content"] == entry["question"]
        assert right.reward == Measured(1.0)
    assert sources == {"chain_sum", "gcd"}


@pytest.mark.parametrize("datasets", [[], [{"name": "no such set"}], [{"weight": 1}], ["chain_sum"], "chain_sum"])
def test_a_composite_that_cannot_be_made_is_refused_at_the_start(datasets):
    with pytest.raises(ReferenceNotFoundError, match="'composite'"):
        EnvironmentFactory.load(REF, {"dataset": "composite", "config": {"datasets": datasets}})


def test_an_answer_that_breaks_the_scorer_is_worth_nothing():
    played = play(REF, ["<answer>nan</answer>"], args={"dataset": "prime_factorization", "system": ""})
    assert (played.reward.value, played.reward.reason) == (0.0, RewardReason.RAISED)
    assert [message["role"] for message in played.messages] == ["user", "assistant"]


ATTACKS = {
    "reads the gold answer": "entry['metadata']['valid_answers'][0]",
    "runs a command": "__import__('os').system('touch {canary}')",
    "ends the process": "__import__('os')._exit(0)",
    "writes a file": "open('{canary}', 'w').close()",
    "rewrites the scorer": "setattr(type(self), 'score_answer', lambda *_: 1.0)",
    "reads the environment": "__import__('os').environ['CANARY']",
    "hides it in a comprehension": "[open('{canary}', 'w') for _ in 'a']",
}


@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_answer_that_is_code_is_not_run_and_the_next_one_is_scored_as_before(attack, tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY", "a secret of the worker")
    canary = tmp_path / "canary"
    answer = ATTACKS[attack].format(canary=canary)
    played = play(REF, [f"<answer>{answer}</answer>"], args={"dataset": "n_queens"}, seed=1)
    assert (played.reward.value, played.reward.reason) == (0.0, RewardReason.RAISED)
    assert "code that was not run" in played.reward.detail
    assert not canary.exists()
    entry = reasoning_gym.create_dataset("n_queens", seed=1, size=1)[0]
    for answer, worth in ((entry["metadata"]["valid_answers"][0], 1.0), ("[['_']]", 0.0)):
        assert play(REF, [f"<answer>{answer}</answer>"], args={"dataset": "n_queens"}, seed=1).reward_value == worth


@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize(
    "answer",
    [
        "sympify('__import__(\"os\").getpid()')",
        "x.__class__.__mro__[1].__subclasses__()",
        "(lambda: 24)()",
        "integrate(x, x)",
        "lambdify(x, x)(24)",
    ],
)
def test_what_sympy_would_call_for_an_answer_is_not_called(answer):
    played = play(REF, [f"<answer>{answer}</answer>"], args={"dataset": "simple_integration"}, seed=1)
    assert (played.reward.value, played.reward.reason) == (0.0, RewardReason.RAISED)


@pytest.mark.usefixtures("needs_sandbox")
def test_mathematics_in_an_answer_is_evaluated_as_before():
    entry = reasoning_gym.create_dataset("simple_integration", seed=1, size=1)[0]
    for answer in (entry["answer"], f"{entry['answer']} + sin(x)**2 + cos(x)**2"):
        assert (
            play(REF, [f"<answer>{answer}</answer>"], args={"dataset": "simple_integration"}, seed=1).reward_value == 1
        )


@pytest.mark.usefixtures("needs_sandbox")
def test_an_answer_that_takes_too_long_is_worth_nothing_and_the_next_one_is_scored():
    args = {"dataset": "countdown", "cpu_s": 1}
    played = play(REF, ["<answer>9**9**9**9</answer>"], args=args)
    assert (played.reward.value, played.reward.reason) == (0.0, RewardReason.TIMEOUT)
    assert play(REF, ["<answer>1 + 1</answer>"], args=args).reward_value == 0.05  # it uses other numbers


@pytest.mark.usefixtures("needs_sandbox")
def test_a_scorer_finds_neither_files_nor_variables_nor_network_of_the_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY", "a secret of the worker")
    (tmp_path / "canary").write_text("a file of the run")
    job = msgspec.json.encode([str(tmp_path / "canary"), str(Path.cwd() / "pyproject.toml"), "/etc/passwd"])
    (outcome,) = run_in_pool("tests.adapters.nosy:handler", {}, Isolation("sandbox", (NOSY,)), [job], 20)
    assert msgspec.json.decode(outcome.value) == {
        "files": [False, False, False],
        "variables": [],
        "processes": 0,
        "network": False,
    }


def test_without_a_sandbox_a_data_set_that_evaluates_answers_needs_a_word_of_the_user(monkeypatch):
    monkeypatch.setattr(reasoning_gym_tasks, "sandbox_problem", lambda: "bwrap: No permissions")
    with pytest.raises(ReferenceNotFoundError, match=r"(?s)evaluates.*bwrap: No permissions.*isolation"):
        ReasoningGym("countdown")
    assert ReasoningGym("countdown", isolation="process")
    assert ReasoningGym("chain_sum")
    played = play(REF, ["<answer>open('/tmp/x')</answer>"], args={"dataset": "n_queens", "isolation": "process"})
    assert "code that was not run" in played.reward.detail


@given(st.lists(st.sampled_from(["<answer>", "</answer>", " ", "\n", "7", "answer>", "<"])).map("".join))
def test_the_answer_is_what_reasoning_gym_takes_for_it(text):
    assert extract_answer(text) == reasoning_gym.utils.extract_answer(text)


@pytest.mark.timeout(20)
def test_a_long_run_of_opening_tags_takes_no_time():
    assert extract_answer("<answer>" * 500_000) is None

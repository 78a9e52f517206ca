"""reasoning-gym's data sets as environments, scored as its own scorer does."""

import pytest

from envs.factory import EnvironmentFactory
from stream.errors import ReferenceNotFoundError
from stream.validity import Measured, RewardReason
from workers.testing import play

reasoning_gym = pytest.importorskip("reasoning_gym", reason='needs pip install "penstock[reasoning-gym]"')
REF = "envs.adapters.reasoning_gym_tasks:ReasoningGym"
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


def test_an_answer_that_breaks_the_scorer_is_worth_nothing(monkeypatch):
    cls = type(reasoning_gym.create_dataset("chain_sum", size=1))
    monkeypatch.setattr(cls, "score_answer", lambda *_: 1 / 0)
    played = play(REF, ["<answer>1</answer>"], args={"dataset": "chain_sum", "system": ""})
    assert (played.reward.value, played.reward.reason) == (0.0, RewardReason.RAISED)
    assert [message["role"] for message in played.messages] == ["user", "assistant"]

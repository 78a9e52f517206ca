"""Settings, environments and rewards in examples/ are valid."""

import json
from pathlib import Path

import pytest

from envs.factory import EnvironmentFactory
from envs.rewards import RewardFunction
from workers.settings.toml_file import load_settings

ROOT = Path(__file__).parents[2]


TASKS = [ROOT / f"examples/real_model/{name}.toml" for name in ("sums", "divisors", "sorting")]
AGENTS = sorted(ROOT.glob("examples/agents/*/run.toml"))
"""They need programs that are not installed here; tests/agents plays them."""
SETTINGS = [*sorted(ROOT.glob("examples/*/run.toml")), *AGENTS, *TASKS]


@pytest.mark.parametrize("file", SETTINGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_example_has_prompts_an_environment_and_a_reward(file, monkeypatch):
    if file in TASKS:
        pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(file.parent)
    settings = load_settings(file)
    if settings.data.path:
        rows = [json.loads(line) for line in Path(settings.data.path).read_text().splitlines()]
        assert all(row[settings.data.prompt] for row in rows)
    if file in AGENTS:
        return
    for named in settings.environments.values():
        factory = EnvironmentFactory.load(*([named] if isinstance(named, str) else [named.ref, named.args]))
        has_turns = factory.tools or factory.responds or factory.runs_own_loop
        assert has_turns or settings.rollout.max_turns == 1
        assert factory.has_reward
        assert settings.data.path or settings.data.rows or factory.has_rows
    for reward in settings.rewards:
        assert RewardFunction.load(reward.ref, reward.weight, reward.run_in, reward.name, reward.args).name

"""Very long turns and tool results are truncated, and handled in a thread."""

import threading

import pytest

from stream.validity import TruncationReason
from workers.check.scripted import call, play
from workers.rollout import environment_slot as slots
from workers.rollout.tool_formats.json_formats import Hermes
from workers.rollout.tool_result import MAX_CHARACTERS_PER_TOKEN, truncate_result
from workers.settings import RolloutSettings

LIMITS = RolloutSettings(max_tokens=1000, max_tokens_per_turn=1000)
MOST = MAX_CHARACTERS_PER_TOKEN * LIMITS.max_tokens


class Wordy:
    def reset(self, **row):
        pass

    def text(self, length: int) -> str:
        """A long text."""
        return "x" * length

    def parts(self, length: int) -> list:
        """Long parts."""
        return [{"type": "text", "text": "x" * length}, {"type": "image", "image": "y" * length}]

    def get_reward(self):
        return 1.0


def told(length):
    return "x" * MOST + f"\n(cut off: it has {length:,} characters)"


@pytest.mark.parametrize("length", [MOST + 1, 5_000_000])
def test_a_result_longer_than_a_completion_is_cut_with_a_note(length):
    played = play(Wordy, [call("text", length=length)], limits=LIMITS)
    assert played.tool_replies == [told(length)]
    assert played.truncated is TruncationReason.LENGTH
    assert played.reward_value == 1.0


def test_text_parts_are_cut():
    played = play(Wordy, [call("parts", length=5_000_000)], limits=LIMITS)
    text, image = played.tool_replies[0]
    assert text["text"] == told(5_000_000)
    assert len(image["image"]) == 5_000_000


def test_a_result_that_fits_is_unchanged():
    assert truncate_result("x" * MOST, LIMITS.max_tokens) == "x" * MOST
    assert truncate_result([{"type": "image"}], 1) == [{"type": "image"}]
    assert play(Wordy, [call("text", length=100)], limits=LIMITS).tool_replies == ["x" * 100]


def test_a_long_turn_is_parsed_in_a_thread(monkeypatch):
    result = {}
    parse, call_tools = Hermes.parse, slots.EnvironmentSlot.call_tools

    def noted(self, text, **more):
        result[len(text) > 20_000] = threading.get_ident()
        return parse(self, text, **more)

    async def on_the_loop(self, *arguments):
        result["loop"] = threading.get_ident()
        return await call_tools(self, *arguments)

    monkeypatch.setattr(Hermes, "parse", noted)
    monkeypatch.setattr(slots.EnvironmentSlot, "call_tools", on_the_loop)
    played = play(Wordy, ["x" * 30_000 + str(call("text", length=1)), "y"])
    assert played.tool_replies == ["x"]
    assert result[False] == result["loop"] != result[True]

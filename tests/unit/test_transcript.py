"""A completion as lines of text."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from stream.records import Completion, Failure, RewardPart, Row, Span, ToolRun
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from workers.runs.transcript import shorten
from workers.terminal.lines import compact_lines, completion_lines


def call(name, arguments, number=1):
    return {"id": f"call{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def sampled(count: int, version: int = 7) -> Row:
    zeros = bytes(4 * count)
    spans = [Span(version, 0, count)]
    return Row(prompt_ids=bytes(8), token_ids=zeros, sampled_ranges=[(0, count)], logprobs=zeros, spans=spans)


def episode(**fields) -> Completion:
    known = {
        "index": 0,
        "rows": [sampled(31)],
        "prompt_messages": [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "17 * 3 + 4?"}],
        "messages": [
            {"role": "assistant", "content": "I multiply.", "tool_calls": [call("multiply", {"a": 17, "b": 3})]},
            {"role": "tool", "name": "multiply", "tool_call_id": "call1", "content": "51"},
            {"role": "assistant", "content": "", "tool_calls": [call("add", '{"a": oops', 2)]},
            {"role": "tool", "tool_call_id": "call2", "content": "Error: no JSON"},
            {"role": "assistant", "content": "Answer: 55"},
        ],
        "parts": [
            RewardPart(name="exact", reward=Measured(1.0)),
            RewardPart(name="format", reward=Measured(0.5), weight=0.2, turn=1),
        ],
        "reward": Measured(1.1),
        "turns": 3,
        "tool_calls": 2,
        "tool_errors": 1,
        "tool_runs": [ToolRun(0.0021), ToolRun(0.0, is_error=True)],
        "seconds": {"total": 0.84},
    }
    return Completion(**(known | fields))


def test_a_completion_shows_speakers_calls_durations_reward_and_end():
    assert "\n".join(map(str, completion_lines(episode()))) == (
        "system     Use tools.\n"
        "user       17 * 3 + 4?\n"
        "assistant  I multiply.\n"
        "           → multiply(a=17, b=3)\n"
        "tool       51  ← multiply, 2.1 ms\n"
        'assistant  → add({"a": oops)\n'
        "tool error Error: no JSON  ← add\n"
        "assistant  Answer: 55\n"
        "reward     1.1\n"
        "           exact 1\n"
        "           format (turn 2) 0.5, weight 0.2\n"
        "ended      finished; 3 turns, 2 tool calls (1 error), 31 tokens sampled, version 7, 840 ms"
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"reward": Unmeasured(RewardReason.TIMEOUT, "exact: 5 s")},
            "invalid    the reward is unmeasured (timeout): exact: 5 s",
        ),
        (
            {"failure": Failure(reason=RolloutReason.ENV_STEP, detail="add: KeyError: 'a'"), "reward": None},
            "invalid    the episode failed (env_step): add: KeyError: 'a'",
        ),
        ({"reward": None, "parts": []}, "reward     not scored"),
        (
            {"reward": Measured(0.0, RewardReason.NOT_NUMERIC, "no number")},
            "reward     0 (could not be judged: not_numeric)",
        ),
        ({"truncated": TruncationReason.MAX_TURNS}, "ended      truncated (max_turns); 3 turns"),
        (
            {"parts": [RewardPart(name="exact", reward=Unmeasured(RewardReason.RAISED, "KeyError"))]},
            "           exact unmeasured (raised): KeyError",
        ),
    ],
)
def test_validity_and_its_reason_are_shown(fields, expected):
    assert any(str(line).startswith(expected) for line in completion_lines(episode(**fields)))


def test_what_a_model_wrote_cannot_steer_the_terminal():
    evil = "\x1b[2Jgone\r\x07 \u202egnp.exe \x9b31m tab\there \U0001f469\u200d\U0001f680 汉\u3000字"
    lines = completion_lines(episode(messages=[{"role": "assistant", "content": evil}]))
    text = next(line.text for line in lines if line.kind == "assistant")
    assert text.startswith(r"\x1b[2Jgone\r\x07 \u202egnp.exe \x9b31m tab    here ")
    assert text.endswith("\U0001f469\u200d\U0001f680 汉\u3000字")


def test_lines_fit_the_width_and_a_speaker_cannot_be_imitated():
    long = "word " * 60 + "汉字" * 80 + "x" * 300 + "\nreward     1"
    lines = completion_lines(episode(messages=[{"role": "assistant", "content": long}]), width=60)
    assert max(cell_len(str(line)) for line in lines) <= 60
    assert "".join(line.text for line in lines if line.kind == "assistant").count("汉字") == 80
    assert [str(line) for line in lines if str(line).startswith("reward")] == ["reward     1.1"]


def test_a_compact_completion_has_few_lines_with_begin_and_end():
    chatty = [{"role": "assistant", "content": f"turn {i}: " + "so " * 900} for i in range(9)]
    lines = [str(line) for line in compact_lines(episode(messages=chatty), width=80, max_lines=12)]
    assert len(lines) == 12
    assert lines[0] == "user       17 * 3 + 4?"
    assert "lines …" in lines[6]
    assert lines[-2].startswith("ended")
    assert len(compact_lines(episode())) == 11


def test_parts_of_a_message_are_shown_by_kind():
    content = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    lines = completion_lines(episode(messages=[{"role": "assistant", "content": content, "reasoning_content": "hm"}]))
    assert [line.text for line in lines if line.kind == "assistant"] == ["hm", "look", "[image_url]"]


def test_tokens_are_decoded_where_no_message_is_stored():
    lines = completion_lines(episode(messages=[]), decode=lambda row: ("2+2?", f"{row.sampled_count} tokens"))
    assert [str(line) for line in lines][:2] == ["prompt     2+2?", "sampled    31 tokens"]


def test_colors_are_those_of_the_speaker():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    for line in completion_lines(episode()):
        console.print(line.rich_text())
    assert "\x1b[36massistant" in console.file.getvalue()


def test_the_middle_of_a_long_text_is_left_out():
    assert shorten("a" * 8 + "b" * 8, 6) == "aaaa … 10 characters … bb"
    assert shorten("ab", 6) == "ab"


@pytest.mark.parametrize("mark", ["<-", "←"])
def test_a_long_line_is_broken_between_words(mark):
    said = f'expected one of "espresso", "americano", "tea", got "vx"  {mark} brew'
    shown = completion_lines(episode(prompt_messages=[{"role": "user", "content": said}]), width=64)
    assert [line.text for line in shown[:2]] == [
        'expected one of "espresso", "americano", "tea", got',
        f'"vx"  {mark} brew',
    ]

"""Values in a notebook: as tables in which nothing that a model wrote is HTML, and in one line as text."""

import json
import subprocess
import sys
from html.parser import HTMLParser

import msgspec
import pytest

import penstock
from stream.records import Completion, Group, Prompt
from stream.validity import Measured, RewardReason, Unmeasured
from tests.cases.rows import sampled_row
from workers.check.report import CheckFinding
from workers.runs.groups import CompletionView, RunGroup
from workers.runs.html import group_line, html_table
from workers.runs.progress import Progress
from workers.runs.selection import CompletionFilter, Matches
from workers.runs.summary import FailureReport, Staleness

EVIL = "<img src=x onerror=alert(1)>&amp;</pre></td>\x1b[2J\u202e"
ALLOWED = {"table", "caption", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre"}


class Tags(HTMLParser):
    """The tags of a text, which are all closed."""

    def __init__(self, text):
        super().__init__()
        self.names, self.open, self.data = set(), [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert {name for name, _ in attributes} <= {"style", "colspan"}
        self.names.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.data += data


def shown(html):
    """Return the text of a table, after asserting that it is one, and harmless."""
    tags = Tags(html)
    assert tags.names <= ALLOWED
    assert "\x1b" not in html
    assert "\u202e" not in html
    return tags.data


def completion(index, reward, text=EVIL):
    message = {"role": "assistant", "content": text, "tool_calls": [{"function": {"name": EVIL, "arguments": {}}}]}
    asked = [{"role": "user", "content": f"Say it. {EVIL}"}]
    row = sampled_row((1, 2, 3), [-0.5] * 3, prompt=[7])
    return Completion(index=index, rows=[row], turns=1, prompt_messages=asked, messages=[message], reward=reward)


@pytest.fixture
def group():
    rewards = [Measured(0.25), Unmeasured(RewardReason.RAISED, EVIL)]
    prompt = Prompt(id=f"a:0:{EVIL}", messages=[], environment=EVIL)
    return Group(prompt=prompt, completions=[completion(index, reward) for index, reward in enumerate(rewards)])


@pytest.fixture
def run_group(group):
    return RunGroup([CompletionView(group=group, completion=each, outcome="trained") for each in group.completions])


def matches(items, notes=()):
    class Archive:
        steps = None

        def why_none(self, prompt):
            return ""

        def __len__(self):
            return 0

    return Matches(items, Archive(), CompletionFilter(), list(notes))


def test_a_group_of_a_run_shows_its_completions(run_group):
    text = shown(run_group._repr_html_())
    for words in ("0.25", "the reward is unmeasured (raised)", "trained", "Say it. <img", "tokens", r"\x1b[2J"):
        assert words in text
    assert repr(run_group) == f"RunGroup({run_group.completions[0].group.prompt.id!r}, trained, reward 0.25)"


def test_a_completion_shows_its_conversation(run_group):
    text = shown(run_group.completions[0]._repr_html_())
    assert "user: Say it. <img" in text
    assert "reward: 0.25" in text
    assert "\x1b" not in run_group.completions[0].text()


def test_what_a_search_found_is_a_table_and_its_notes(run_group):
    groups = shown(matches([run_group], [f"unreadable {EVIL}"])._repr_html_())
    assert "reward mean" in groups
    assert "unreadable <img" in groups
    assert "0.25" in shown(matches(run_group.completions)._repr_html_())
    assert "no completion yet" in shown(matches([])._repr_html_())
    assert repr(matches([run_group])) == repr([run_group])


def test_a_run_shows_state_step_and_reward(tmp_path):
    folder = tmp_path / "<b>run"
    (folder / "logs").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 7, "reward/mean": 0.625}\n')
    run = penstock.Run("<b>run", folder)
    text = shown(run._repr_html_())
    for words in ("run <b>run", "killed", "7", "0.625"):
        assert words in text


def test_a_summary_shows_what_is_not_empty():
    zeros = dict.fromkeys(("steps", "groups_trained", "fed", "outstanding", "dead", "duplicates"), 0)
    summary = penstock.RunSummary(
        **zeros,
        groups_dropped={"zero_variance": 3},
        completion_states={"valid": 1200},
        staleness=Staleness(),
        tokens_per_second=12.34567,
        seconds=1.0,
        totals=Progress().totals,
        failure=FailureReport(message=EVIL),
    )
    text = shown(summary._repr_html_())
    for words in ("the run failed", "zero_variance 3", "valid 1,200", "12.35", "<img"):
        assert words in text
    assert "why untrained" not in text


def test_a_report_of_a_check_shows_its_findings_and_everything_that_was_tried():
    finding = CheckFinding(level="error", subject=EVIL, place="a.py:3", message=EVIL, remedy="do this")
    report = penstock.CheckReport(target=EVIL, kind="environment", ok=False, findings=(finding,))
    text = shown(report._repr_html_())
    for words in ("not usable", "a.py:3", "do this", "everything that was tried", "It is not usable: 1 error"):
        assert words in text


def test_of_many_rows_the_first_are_shown():
    text = shown(html_table("", ("number",), [[f"row {n}"] for n in range(150)]))
    assert "row 99" in text
    assert "row 100" not in text
    assert "and 50 more" in text


def test_ipython_shows_a_group_as_a_table_and_in_one_line_and_records_know_nothing_of_it(group, tmp_path):
    (tmp_path / "group.msgpack").write_bytes(msgspec.msgpack.encode(group))
    code = """
import json, sys
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
import penstock, msgspec
group = msgspec.msgpack.decode(Path("group.msgpack").read_bytes(), type=penstock.Group)
before = "workers.runs.html" in sys.modules
print(json.dumps([shell.display_formatter.format(group)[0], before, "pandas" in sys.modules]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False,
        env={"HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    formats, was_loaded, has_pandas = json.loads(ran.stdout.splitlines()[-1])
    assert "0.25" in shown(formats["text/html"])
    assert formats["text/plain"] == group_line(group)
    assert not was_loaded
    assert not has_pandas

"""An environment's own `render(snapshot)`: where it is called, and what happens if it misbehaves."""

import json

import pytest
from click.testing import CliRunner

from envs.contract import offers_render
from envs.factory import EnvironmentFactory
from envs.snapshot import freeze
from envs.snapshot.render import MAX_CHARACTERS, RenderedSnapshot, render_snapshot, render_snapshots
from stream.records import Completion, Group, Prompt
from stream.validity import Measured
from tests.cases.checks import tried
from tests.cases.pages import browser, text_of
from tests.cases.run_folders import ArchivedRun
from workers.cli import penstock
from workers.runs.transcript import paragraphs
from workers.terminal.lines import paragraph_lines

SOURCE = '''
import time

class Board:
    """A board that shows itself."""

    def reset(self, mode="board", **row):
        self.mode, self.cells = mode, [["x", "o"], [".", "<b>\\x1b[31m"]]

    def render(self, snapshot):
        if snapshot.mode == "raise":
            return {}["till"]
        if snapshot.mode == "hang":
            time.sleep(60)
        if snapshot.mode == "number":
            return 7
        if snapshot.mode == "long":
            return "x" * 30_000
        return "\\n".join(" ".join(row) for row in self.cells)
'''


@pytest.fixture
def board(tmp_path):
    """The reference of the environment, and a function that makes a snapshot of it."""
    (tmp_path / "board.py").write_text(SOURCE)
    ref = f"{tmp_path}/board.py:Board"
    factory = EnvironmentFactory.load(ref)

    def snapshot(mode: str = "board") -> bytes:
        env = factory.make()
        env.reset(mode)
        return freeze(env, 10_000)

    return ref, factory, snapshot


class Methods:
    def one(self, snapshot): ...

    def another(self, snapshot, width=3): ...

    @staticmethod
    def third(snapshot): ...

    def page(self, number): ...

    def nothing(self): ...

    def two(self, snapshot, width): ...


@pytest.mark.parametrize(
    ("method", "offers"),
    [("one", True), ("another", True), ("third", True), ("page", False), ("nothing", False), ("two", False)],
)
def test_a_render_that_needs_a_snapshot_alone_is_no_tool_and_any_other_one_is(method, offers):
    source = vars(Methods)[method]
    cls = type("Env", (), {"reset": lambda self: None, "render": source})
    assert offers_render(cls()) is offers
    tools = EnvironmentFactory.from_callable(type("Env", (), {"reset": lambda self: None, "render": source})).tools
    assert [tool.name for tool in tools] == ([] if offers else ["render"])


def test_what_render_returns_is_shown_and_what_it_raises_is_said(board):
    _, factory, snapshot = board
    assert render_snapshot(factory, snapshot()).text == "x o\n. <b>\x1b[31m"
    assert render_snapshot(factory, snapshot("raise")).error == "render raised KeyError: 'till' (board.py, line 12)"
    assert "object of type int; it must return a str" in render_snapshot(factory, snapshot("number")).error
    assert render_snapshot(factory, snapshot("long")).text.endswith(f"x\n… {30_000 - MAX_CHARACTERS:,} more characters")
    assert "not a snapshot" in render_snapshot(factory, b"junk").error
    silent = EnvironmentFactory.load("calculator")
    assert render_snapshot(silent, snapshot()) == RenderedSnapshot()


async def test_a_render_that_hangs_is_killed_and_costs_no_other_snapshot(board, monkeypatch):
    monkeypatch.setattr("envs.snapshot.render.RENDER_TIMEOUT_S", 0.5)
    ref, _, snapshot = board
    hanging, other = await render_snapshots(ref, {}, [snapshot("hang"), snapshot()])
    assert hanging == RenderedSnapshot(error="render: it did not return within 0.5 s")
    assert other.text.startswith("x o\n")


@pytest.fixture
def folder(board, tmp_path):
    """A run with a group of an environment that renders, and of one whose file is not here."""
    ref, _, snapshot = board
    run = ArchivedRun(tmp_path / "run", environments=f'board = "{ref}"\ngone = "gone.py:Gone"')
    for name in ("board", "gone"):
        completion = Completion(index=0, reward=Measured(1.0), snapshot=snapshot())
        run.end(Group(prompt=Prompt(id=name, messages=[], environment=name), completions=[completion]))
    return run.path


async def test_the_page_shows_the_final_state_as_text(folder):
    async with browser(folder) as session:
        assert "Show the environment's final state" in await text_of(session, "/runs/run/group?id=board")
        page = await text_of(session, "/runs/run/group/snapshot?id=board&completion=0")
    assert "x o\n. &lt;b&gt;\\x1b[31m</pre>" in page
    assert "<dt><code>mode</code></dt><dd><code>&#39;board&#39;</code></dd>" in page


def test_the_command_shows_the_final_state_or_why_it_cannot(folder):
    result = CliRunner().invoke(penstock, ["show", str(folder), "--json"])
    gone, board = map(json.loads, result.stdout.splitlines())
    assert (board["rendered"], board["render_error"]) == ("x o\n. <b>\x1b[31m", None)
    assert (gone["rendered"], gone["render_error"]) == (None, None)
    assert "final states are not rendered: the environment 'gone.py:Gone' cannot be loaded here" in result.stderr


def test_a_final_state_is_escaped_for_a_terminal_and_keeps_its_lines():
    completion = Completion(index=0)
    *_, last = paragraphs(completion, state="  x o\n. \x1b[31m")
    assert [str(line) for line in paragraph_lines([last], 60)] == ["state        x o", "           . \\x1b[31m"]
    assert [each.label for each in paragraphs(completion)] == ["reward", "ended"]


def test_check_calls_render_once_and_warns_if_it_raises(board):
    ref, _, _ = board
    assert tried(ref).trial.rendered.startswith("x o\n")
    raising = tried(ref, {"mode": "raise"})
    assert raising.trial.rendered == ""
    words = "render raised KeyError: 'till' (board.py, line 12)"
    assert [warning for warning in raising.warnings if warning.startswith(words)]

"""The branches of an agent's conversation on the dashboard's page of a group."""

import re
from html.parser import HTMLParser
from pathlib import Path

import anyio.to_thread
import pytest
from msgspec.structs import replace

from stream.records import Branch, BranchRole, Completion, Group, Prompt, TrainedCompletion
from tests.cases.agent_completion import agent_completion, said, trained_agent
from tests.cases.pages import browser, text_of
from tests.cases.run_folders import ArchivedRun
from workers import demo
from workers.dashboard.token_view import token_page
from workers.runs.branches import trained_in_row


class Tree(HTMLParser):
    """The list in `details.branches`, as lines that are indented by their depth; all tags are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.open: list[str] = []
        (part,) = re.findall(r'<details class="branches".*?</details>', page, re.DOTALL)
        self.feed(part)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag == "li":
            self.lines.append("  " * (self.open.count("ul") - 1))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "li" in self.open:
            self.lines[-1] += data.replace("\n", "")


def write(folder, completion: Completion, trained: TrainedCompletion = trained_agent()) -> None:  # noqa: B008
    made = ArchivedRun(folder)
    made.end(Group(prompt=Prompt(id="birds", messages=[]), completions=[completion]), done=[trained])


async def group_page(folder, query: str = "") -> str:
    async with browser(folder) as session:
        return await text_of(session, f"/runs/{folder.name}/group?id=birds{query}")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


async def test_a_completion_has_its_branches_as_nested_lists(folder):
    await anyio.to_thread.run_sync(write, folder, agent_completion())
    assert Tree(await group_page(folder)).lines == [
        "main 1 row 0 row 1 2 turns \u00b7 7 tokens \u00b7 2 rows \u00b7 trained \u00b7 row 1 rewritten by template",
        "  sub search 1 row 3 2 turns \u00b7 5 tokens \u00b7 loss on 4",
        "    sub search 2 after turn 1 row 4 1 turn \u00b7 1 token \u00b7 not trained (superseded) \u00b7 limit length",
        "  compact after turn 2 row 5 1 turn \u00b7 6 tokens \u00b7 trained",
        "side row 2 1 turn \u00b7 2 tokens \u00b7 not trained (role)",
        "main 2 from compact row 6 1 turn \u00b7 8 tokens \u00b7 trained",
    ]


async def test_each_branch_leads_to_its_messages_and_to_its_rows(folder):
    await anyio.to_thread.run_sync(write, folder, agent_completion())
    page = await group_page(folder, "&tokens=0&row=4")
    targets = re.findall(r'href="#(c0-b\d+)"', page)
    assert targets == ["c0-b0", "c0-b2", "c0-b3", "c0-b4", "c0-b1", "c0-b5"]
    assert [page.count(f'id="{target}"') for target in targets] == [1] * 6
    assert (
        'href="/runs/run/group?id=birds&amp;tokens=0&amp;row=5#tokens-0" aria-label="Tokens of row 5, compact"' in page
    )
    assert re.search(r'aria-current="true" href="[^"]*row=4#tokens-0">row 4 <span class="quiet">sub search 2<', page)
    section = page[page.index('id="c0-b2"') : page.index('id="c0-b3"')]
    assert re.findall(r'<span class="quiet">(turn \d)</span>|class="text">([^<]*)<', section) == [
        ("", "You look for birds. Look in the north."),
        ("turn 1", ""),
        ("", "I go north."),
        ("", "Go on."),
        ("turn 2", ""),
        ("", "A crane."),
    ]


def long_branches(count: int) -> Completion:
    """Return a completion with branches of ten turns each."""
    messages = [said("assistant", f"Answer {number}.") for number in range(10 * count)]
    branches = [
        Branch(role=BranchRole.SUB, turns=10, answers=tuple(range(10 * at, 10 * at + 10))) for at in range(count)
    ]
    return Completion(index=0, messages=messages, branches=branches)


async def test_every_message_of_many_branches_is_shown_or_can_be_asked_for_once(folder):
    await anyio.to_thread.run_sync(write, folder, long_branches(20))
    async with browser(folder) as session:
        page = await text_of(session, "/runs/run/group?id=birds")
        shown = re.findall(r"Answer (\d+)\.", page)
        assert 30 < len(shown) < 50
        assert '<details class="branches">' in page  # a long tree is closed at first
        for start, end in re.findall(r"from=(\d+)&amp;to=(\d+)", page):
            more = await text_of(session, f"/runs/run/group/messages?id=birds&completion=0&from={start}&to={end}")
            shown += re.findall(r"Answer (\d+)\.", more)
    assert sorted(map(int, shown)) == list(range(200))


async def test_what_a_program_calls_its_branches_is_shown_as_text(folder):
    completion = agent_completion()
    completion.branches[2] = replace(completion.branches[2], name="<b>evil\u202e</b>")
    await anyio.to_thread.run_sync(write, folder, completion)
    page = await group_page(folder)
    assert "<b>evil" not in page
    assert r"sub &lt;b&gt;evil\u202e&lt;/b&gt;" in page


async def test_a_completion_of_a_single_line_has_no_tree_and_one_run_of_messages(folder):
    await anyio.to_thread.run_sync(write, folder, agent_completion(branches=[]))
    page = await group_page(folder)
    assert 'class="branch' not in page
    assert "9 messages here; show" in page


def letters(token_ids: bytes, start: int, end: int) -> str:
    return "abcdefgh"[start:end]


@pytest.mark.parametrize(
    ("row", "trained", "legend"),
    [
        (2, TrainedCompletion("valid", 0.5, 26), "no loss: its role is not in agents.train"),
        (4, trained_agent(), "no loss: another answer was continued"),
        (0, trained_agent(), "bears loss"),
        (4, TrainedCompletion("reward:timeout", None, 0), "no loss: another answer was continued"),
    ],
)
def test_tokens_of_a_discarded_branch_say_why_they_bear_no_loss(row, trained, legend):
    completion = agent_completion()
    shown = trained_in_row(completion, row, trained)
    page = token_page(completion.rows[row], row, shown, letters, "mask", 0)
    assert page.legend[0].text == legend
    assert {token.css for token in page.tokens} == {"tint-2" if legend == "bears loss" else "no-loss"}


async def test_the_token_view_of_a_discarded_branch_says_why_it_is_not_trained(folder):
    await anyio.to_thread.run_sync(write, folder, agent_completion())
    model = Path(demo.__file__).parent / "models" / "calculator"
    settings = folder / "run.toml"
    settings.write_text(settings.read_text().replace('[model]\npath = "none"', f'[model]\npath = "{model}"'))
    assert "no loss: another answer was continued" in await group_page(folder, "&tokens=0&row=4&color=mask")
    assert "bears loss" in await group_page(folder, "&tokens=0&row=5&color=mask")


def test_tokens_of_a_discarded_branch_with_loss_are_shown_with_it():
    rows = list(trained_agent().rows)
    rows[4] = rows[0]
    trained = TrainedCompletion("valid", 0.5, 26, tuple(rows))
    assert trained_in_row(agent_completion(), 4, trained) is trained

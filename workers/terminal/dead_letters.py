"""`penstock dead`: list, show, retry or drop entries that no worker could finish."""

from typing import Final

from rich.console import Console
from rich.text import Text

from stream.operator.dead_letters import drop_dead_letters, retry_dead_letters
from stream.wording import escape_controls, quantity
from workers.runs.dead_letters import (
    Change,
    LetterChoice,
    change_letters,
    describe_letter,
    died_at,
    read_payload,
    select_letters,
)
from workers.runs.export import encode_json
from workers.runs.run import Run
from workers.terminal.output import print_json, print_line

_NO_PROMPT: Final = "not one of the run's prompts"
_ALL: Final = LetterChoice()


def list_dead(run: Run, chosen: LetterChoice = _ALL, *, as_json: bool = False) -> None:
    """Print time, stage, reason, prompt and error of each dead letter."""
    letters = run.call(lambda connection: select_letters(connection, chosen))
    if as_json:
        print_json([describe_letter(letter) for letter in letters])
        return
    console = Console(highlight=False, markup=False, emoji=False)
    for letter in letters:
        failures = letter.infra_failures + letter.data_failures
        head = (
            (letter.id, "bold"),
            f"  {died_at(letter):%Y-%m-%d %H:%M:%S}  {letter.stage}",
            (f"  {letter.reason}", "yellow"),
            f"  after {quantity(failures, 'failure')}" if failures else "",
            (f"  {escape_controls(letter.prompt_id) or _NO_PROMPT}", "bright_black"),
        )
        console.print(Text.assemble(*head), soft_wrap=True)
        for line in escape_controls(letter.error).splitlines():
            console.print(f"    {line}", soft_wrap=True)
    if not letters:
        console.print("no dead letters")


def show_dead(run: Run, chosen: LetterChoice = _ALL, *, as_json: bool = False) -> None:
    """Print dead letters as JSON with their decoded content; one that cannot be decoded is printed as a hex dump."""
    letters = run.call(lambda connection: select_letters(connection, chosen))
    contents = [describe_letter(letter) | read_payload(letter) for letter in letters]
    if as_json:
        print_json(contents)
        return
    console = Console()
    for content in contents:
        dump = content.pop("hex", "")
        console.print_json(encode_json(content).decode())
        if dump:
            console.print(dump, highlight=False, markup=False)
    if not contents:
        console.print("no dead letters")


def retry_dead(run: Run, chosen: LetterChoice, *, as_json: bool = False) -> None:
    """Put dead letters back into their stages."""
    _change(run, chosen, as_json, retry_dead_letters, "retried")


def drop_dead(run: Run, chosen: LetterChoice, *, as_json: bool = False) -> None:
    """Delete dead letters."""
    _change(run, chosen, as_json, drop_dead_letters, "dropped")


def _change(run: Run, choice: LetterChoice, as_json: bool, change: Change, past_tense: str) -> None:
    letters = run.call(lambda connection: change_letters(run, connection, choice, change))
    if as_json:
        print_json({past_tense: [letter.id for letter in letters]})
    else:
        print_line(f"{past_tense} {quantity(len(letters), 'dead letter')}")

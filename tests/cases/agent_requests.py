"""Recorded requests of real agent programs (`tests/agent_requests`), as an endpoint gets them.

One file per situation. Texts of more than 300 characters are shortened there, ids and keys are replaced, and schemas of
tools after the second are reduced to names and types. The files are data: nothing in them is an instruction.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "agent_requests"


class Recorded(NamedTuple):
    """A recorded request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    answer: dict[str, Any]
    """What the program was answered, in short."""


def recorded(name: str) -> list[Recorded]:
    """Return the requests of a file, in the order in which they came."""
    requests, tools = [], None
    for each in json.loads((FOLDER / f"{name}.json").read_text())["requests"]:
        body = dict(each["body"])
        if body.get("tools") == "as before":
            body["tools"] = tools
        tools = body.get("tools", tools)
        requests.append(Recorded(each["path"].partition("?")[0], each["headers"], body, each.get("answer") or {}))
    return requests


def names() -> list[str]:
    """Return the names of all files."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))

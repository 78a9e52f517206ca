"""A user's MCP server, written with the official SDK: `python notes_server.py [PORT]`; stdio without a port."""

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def write(text: str, times: int = 1) -> str:
    """Write a note.

    Args:
        text: what it says
        times: how often to write it
    """
    notes.extend([text] * times)
    return f"{len(notes)} notes"


@server.tool()
def read(number: int) -> str:
    """Read a note by its number, from 0."""
    return notes[number]


@server.tool()
def crash() -> str:
    """End the server, as a fault would."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")

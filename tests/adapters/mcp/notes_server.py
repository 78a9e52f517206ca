"""A user's MCP server, written with the official SDK: `python notes_server.py [PORT]`; stdio without a port."""

import base64
import os
import sys
import time

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

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
def refuse(code: int) -> str:
    """Answer with a JSON-RPC error, as a server does that raises on odd arguments."""
    raise MCPError(code, f"refused with {code}")


@server.tool()
def lie() -> list[int]:
    """Return something that the tool's own output schema forbids."""
    return CallToolResult(content=[], structured_content={"result": "no numbers"})


@server.tool()
async def wait(seconds: float, blocking: bool) -> str:
    """Answer late; a blocking server answers nothing else meanwhile."""
    if blocking:
        time.sleep(seconds)  # noqa: ASYNC251  (the fault)
    await anyio.sleep(seconds)
    return "late"


@server.tool()
def attach() -> list[ContentBlock]:
    """Return one of each kind of content."""
    blob = base64.b64encode(b"12345").decode()
    resources = [
        TextResourceContents(uri="note://1", mime_type="text/plain", text="a note"),
        BlobResourceContents(uri="note://2", mime_type="image/png", blob=blob),
        BlobResourceContents(uri="note://3", mime_type="application/pdf", blob=blob),
    ]
    return [
        TextContent(text="here:"),
        *(EmbeddedResource(resource=each) for each in resources),
        ImageContent(data=blob, mime_type="image/jpeg"),
        AudioContent(data=blob, mime_type="audio/wav"),
        ResourceLink(uri="note://4", name="fourth", description="the last one"),
    ]


@server.tool()
def crash() -> str:
    """End the server, as a fault would."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")

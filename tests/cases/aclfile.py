"""The users of docs/redis.md, for tests of a run on a server with permissions."""

from tests.pages import ROOT, blocks_of

USERS = ("trainer", "worker", "reader")


def aclfile(run: str, password: str) -> str:
    """Return the page's aclfile for this run, with one password for all users."""
    (file,) = (block.text for block in blocks_of(ROOT / "docs" / "redis.md", "text") if block.text.startswith("user "))
    return file.replace("my-run", run).replace("PASSWORD", password)


def url_of(server_url: str, run: str, user: str, password: str) -> str:
    """Return the URL of a server on a Unix socket for one of the users; the password is escaped."""
    return server_url.replace("unix://", f"unix://{run}-{user}:{password}@")

"""The text of a server's URL: whether it holds a secret, and how to show it without."""

from urllib.parse import unquote, urlsplit


def has_secret(url: str) -> bool:
    """Return whether a URL has a password, or might have one: a URL that cannot be parsed counts as one that has."""
    if not url:
        return False
    from redis.asyncio.connection import parse_url  # only here: that import takes longer than `penstock queues`

    try:
        options = parse_url(url)
    except ValueError:
        return True
    return bool({"password", "ssl_password"} & options.keys()) or not is_unambiguous(url)


def redact_url(url: str) -> str:
    """Return the URL without user, password and options; only the scheme if it cannot be parsed."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        return "the URL"
    if not is_unambiguous(url):
        return f"{scheme}://..."
    parts = urlsplit(url)
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{unquote(parts.path)}"


def misread_part(url: str) -> str:
    """Return what is wrong with a URL that redis-py would read in another way, or in part; empty: nothing.

    The text shows no secret.
    """
    if "://" not in url:
        return "write redis://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return ""  # redis-py refuses it
    if parts.fragment:
        return "leave out # and what follows; write %23 for # in a password"
    if parts.scheme == "unix":
        return "" if parts.path and not parts.hostname else "write unix:///FOLDER/FILE, with three slashes"
    if port == 0:
        return "0 is no port"
    database = unquote(parts.path).strip("/")
    if database and not (database.isascii() and database.isdigit()):
        return (
            "behind the host stands the number of a database, as in redis://HOST:PORT/0; write %2F for / in a password"
        )
    return ""


def is_unambiguous(url: str) -> bool:
    """Return whether a password's position is certain; an unescaped / ? # in a password moves everything after it."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return "@" not in parts.path + parts.query + parts.fragment

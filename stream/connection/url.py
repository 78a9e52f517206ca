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


def is_unambiguous(url: str) -> bool:
    """Return whether a password's position is certain; an unescaped / ? # in a password moves everything after it."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return "@" not in parts.path + parts.query + parts.fragment

"""Templates: everything that comes from a run is escaped, and control and bidirectional characters become visible.

An unexpected exception of a page becomes a line for the viewer, and a traceback in the log.
"""

import functools
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

import anyio.to_thread
import jinja2
import structlog
from aiohttp import web
from markupsafe import Markup

from stream.wording import escape_controls, format_bytes, format_duration

_NOTHING: Final = "\u2013"
_MAX_DIGITS: Final = 15


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render one template of this package with these variables."""
    return _environment().get_template(template).render(values)


def html_response(template: str, values: Mapping[str, Any], status: int = 200) -> web.Response:
    """Return an answer with a rendered template."""
    return web.Response(status=status, text=render(template, values), content_type="text/html", charset="utf-8")


def error_page(status: int, title: str, text: str) -> web.Response:
    """Return a page that says what went wrong."""
    return html_response("error.html", {"title": title, "text": text}, status)


def load_templates() -> None:
    """Compile every template. Blocks on files; afterwards `render` does not."""
    environment = _environment()
    for name in environment.list_templates():
        environment.get_template(name)


def format_count(number: float | None) -> str:
    """Format a whole number with thousands separators; a dash for None."""
    return _NOTHING if number is None else f"{number:,.0f}"


def format_value(value: float | None) -> str:
    """Format a measured value with three significant digits; a dash for None."""
    return _NOTHING if value is None else f"{value:.3g}".replace("-", "\u2212")


def format_age(seconds: float | None) -> str:
    """Format a duration for people; a dash for None."""
    return _NOTHING if seconds is None else format_duration(seconds)


def format_time(at: float | None) -> str:
    """Format a Unix time in seconds; a dash for None and 0."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" if at else _NOTHING


def parse_number(text: str) -> int | None:
    """Return a number of an address; None if it is none, or longer than any number of a page."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


def with_query(path: str, query: Mapping[str, Any], **changes: Any) -> str:
    """Return a path with a query, changed; None and empty values are left out."""
    merged = {name: value for name, value in {**query, **changes}.items() if value not in (None, "", [], ())}
    return f"{path}?{urlencode(merged, doseq=True)}" if merged else path


def _format_json(value: Any) -> str:
    """Format a record for people, with long lists of numbers on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False, default=str)
    return re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)


def _visible(value: Any) -> Any:
    return escape_controls(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("workers.dashboard", "templates"),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "count": format_count,
        "value": format_value,
        "bytes": format_bytes,
        "age": format_age,
        "time": format_time,
        "pretty": _format_json,
        "segment": lambda text: quote(text, safe=""),
    }
    environment.globals["with_query"] = with_query
    return environment


log = structlog.get_logger()


def describe_exception(error: Exception) -> str:
    """Return an unexpected exception as text: its type, and its message if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def log_page_failure(error: Exception, path: str) -> None:
    """Log the traceback of a page, or of a part of one. A traceback reads source files, so it is made in a thread."""
    await anyio.to_thread.run_sync(_log, error, path)


def _log(error: Exception, path: str) -> None:
    log.error("page.failed", path=path, exc_info=error)

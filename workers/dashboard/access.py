"""Who may see the pages, and who may change a run: token, origin, and the headers of every answer."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware
from msgspec import Struct

from stream.errors import SettingsError
from workers.dashboard.templating import error_page, html_response
from workers.engine_api.http_access import AccessRules, is_loopback, is_same_origin
from workers.settings.secrets import DASHBOARD_TOKEN

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_COOKIE: Final = "penstock-dashboard"
_COOKIE_S: Final = 30 * 86400
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Access(Struct, frozen=True, kw_only=True):
    """Where the dashboard listens, and what its viewers may do."""

    host: str = "127.0.0.1"
    token: str = ""
    """Empty: everybody who reaches the address may look, and nobody may change anything."""
    allow_changes: bool = False
    """Pages may retry and drop dead letters."""

    def check(self) -> None:
        """Refuse to be reachable from other machines, or to change anything, without a token.

        Raises:
            SettingsError: the host is not loopback or changes are allowed, and there is no token.
        """
        if self.token:
            return
        if not is_loopback(self.host):
            raise SettingsError(
                f"--host {self.host} lets other machines in: set a token in the environment variable "
                f"{DASHBOARD_TOKEN}, or keep the default host and forward the port (ssh -L)"
            )
        if self.allow_changes:
            raise SettingsError(
                f"--allow-changes lets every user of this machine change runs: set a token in the environment variable "
                f"{DASHBOARD_TOKEN}"
            )

    @property
    def rules(self) -> AccessRules:
        """Which requests are answered at all. Forms are sent by pages, which have the token."""
        return AccessRules(host=self.host, has_token=bool(self.token), takes_forms=True)

    def allows_token(self, token: str) -> bool:
        """Whether this is the token."""
        return not self.token or hmac.compare_digest(_as_bytes(token), _as_bytes(self.token))


def _as_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")  # a header that is not UTF-8 has surrogates


def access_middleware(access: Access) -> Middleware:
    """Return the middleware that refuses requests that may not be answered, and adds the headers of every answer."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        return _refusal(access, request) or await handler(request)

    return check


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the security headers, also to errors and streams."""
    response.headers.update(_HEADERS)
    if not request.path.startswith("/static/"):
        response.headers.setdefault("Cache-Control", "no-store")


def _refusal(access: Access, request: web.Request) -> web.StreamResponse | None:
    """Return the answer to a request that is refused, or that brings its token; None to go on."""
    if access.token and (answer := _check_token(access, request)) is not None:
        return answer
    if request.method not in ("GET", "HEAD"):
        if not access.allow_changes or not access.token:
            return error_page(403, "The dashboard only reads", "Start it with --allow-changes to retry or drop.")
        if not is_same_origin(request):
            return error_page(
                403, "Another site sent this request", "Only this dashboard's own pages may change a run."
            )
    return None


def _check_token(access: Access, request: web.Request) -> web.StreamResponse | None:
    if request.path.startswith("/static/") or request.path == "/health":  # the page that asks for the token needs files
        return None
    given = request.query.get("token")
    if given is not None and request.method == "GET" and access.allows_token(given):
        there = str(request.rel_url.without_query_params("token"))
        answer = web.Response(status=303, headers={hdrs.LOCATION: there})
        answer.set_cookie(
            _cookie_name(request),
            access.token,
            max_age=_COOKIE_S,
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )
        return answer
    _, _, bearer = request.headers.get(hdrs.AUTHORIZATION, "").partition("Bearer ")
    if given is None and access.allows_token(request.cookies.get(_cookie_name(request)) or bearer):
        return None
    return html_response("token.html", {"refused": given is not None}, 401)


def _cookie_name(request: web.Request) -> str:
    """Return a name of this dashboard's own: browsers send cookies to every port of a machine."""
    _, _, port = request.host.rpartition(":")
    return f"{_COOKIE}-{port}" if port.isdecimal() else _COOKIE

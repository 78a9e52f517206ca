"""What programs asked an endpoint for, and what it made of it: routes, refused and ignored fields, and how soon.

For `penstock check` and tests; a run counts only what it warns of.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec import Struct

from workers.rollout.agent_endpoint.fields import FIELDS, FieldUse

DIALECT = web.RequestKey("dialect", str)
"""Key under which the routes note the dialect of a request."""
FIELD_NAMES = web.RequestKey("field_names", tuple[str, ...])
"""The names of its fields."""
ROLES = web.RequestKey("roles", tuple[str, ...])
"""The roles of its messages."""
ERROR = web.RequestKey("error", Exception)
"""The error that it is answered with."""
_BAD_REQUEST = 400


class SeenRequest(Struct, frozen=True, kw_only=True):
    """One request."""

    at_s: float
    """Since the log began."""
    route: str
    """Method and path, without the key; the host for a connection that should be passed on."""
    status: int
    dialect: str = ""
    fields: tuple[str, ...] = ()
    """Names of the fields of its body."""
    roles: tuple[str, ...] = ()
    """Roles of its messages, as the endpoint reads them."""
    error: str = ""
    """Why it was refused."""
    field: str = ""
    """The field that was refused, if it was one."""

    @property
    def is_refused(self) -> bool:
        """Whether it got an error."""
        return self.status >= _BAD_REQUEST or bool(self.error)


class RequestLog:
    """Keeps the requests of an endpoint.

    Attributes:
        requests: in the order in which they were answered.
    """

    def __init__(self) -> None:
        self.requests: list[SeenRequest] = []
        self._began = time.monotonic()

    def middleware(self) -> Middleware:
        """Return what notes each request of an application."""

        @web.middleware
        async def note(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            at_s = time.monotonic() - self._began
            response = await handler(request)
            key, error = request.match_info.get("key"), request.get(ERROR)
            path = request.path.removeprefix(f"/{key}") if key else request.path
            self.requests.append(
                SeenRequest(
                    at_s=at_s,
                    route=f"{request.method} {path}",
                    status=response.status,
                    dialect=request.get(DIALECT, ""),
                    fields=request.get(FIELD_NAMES, ()),
                    roles=request.get(ROLES, ()),
                    error=str(error or ("" if response.status < _BAD_REQUEST else response.reason)),
                    field=getattr(error, "field", ""),
                )
            )
            return response

        return note

    @property
    def first_s(self) -> float | None:
        """Seconds until the first request; None if there was none."""
        return min((request.at_s for request in self.requests), default=None)

    @property
    def routes(self) -> Counter[str]:
        """Return how often each route was asked."""
        return Counter(request.route for request in self.requests)

    @property
    def refused(self) -> list[SeenRequest]:
        """Requests that got an error."""
        return [request for request in self.requests if request.is_refused]

    def fields(self, use: FieldUse | None) -> list[str]:
        """Return the fields of all requests with this use, as `dialect.field`; None: those that stand in no table."""
        given = {(request.dialect, name) for request in self.requests for name in request.fields}
        return sorted(f"{dialect}.{name}" for dialect, name in given if _use(dialect, name) is use)


def _use(dialect: str, name: str) -> FieldUse | None:
    rule = FIELDS[dialect].get(name)
    return rule.use if rule else None

"""Every route of every server, asked as a web page or a careless client would: nothing changes, nothing is read."""

import ast
from pathlib import Path
from urllib.parse import urlencode

import aiohttp
import pytest
from yarl import URL

from tests.cases.servers import SERVERS, TOKEN, Served, Watched, served

ROOT = Path(__file__).parents[2]
JSON = {"Content-Type": "application/json"}
PUBLIC = {"/health", "/static/{name}"}
"""What a dashboard with a token shows to everybody: it has nothing of a run."""

OF_A_PAGE = {
    "a name that resolves to this machine": {"Host": "evil.example", **JSON},
    "a name that only begins like this machine's": {"Host": "127.0.0.1.evil.example", **JSON},
    "a page of a name that resolves to this machine": {"Host": "evil.example", "Origin": "http://evil.example", **JSON},
    "a page of another site": {"Origin": "http://evil.example", **JSON},
    "a page without a site": {"Origin": "null", **JSON},
    "a server at another port of this machine": {"Origin": "http://127.0.0.1:1", **JSON},
    "a page of another site, with its own content type": {
        "Origin": "http://evil.example",
        "Content-Type": "text/plain",
    },
}
CARELESS = {
    "text": {"Content-Type": "text/plain"},
    "a form": {"Content-Type": "application/x-www-form-urlencoded"},
    "no content type": {},
    "a browser that does not say from where": {"Sec-Fetch-Site": "cross-site", **JSON},
}
READS = ("GET", "HEAD")


@pytest.fixture
def watched(monkeypatch) -> Watched:
    """Notes the routes that are served, and the requests that reach them."""
    return Watched(monkeypatch)


async def ask(server: Served, method: str, path: str, headers: dict[str, str], body: bytes = b"{}") -> int:
    """Send a request; return the answer's status."""
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(timeout=timeout, skip_auto_headers=["Content-Type"]) as session:
        url = server.url + path.format(**server.values)
        body = b"" if method in READS else body
        async with session.request(method, url, headers=headers, data=body, allow_redirects=False) as response:
            return response.status


@pytest.mark.parametrize("name", SERVERS)
async def test_no_route_serves_a_web_page_or_a_request_without_its_content_type(
    name, watched, tmp_path, pipe, redis_url
):
    async with served(name, tmp_path, pipe, redis_url) as server:
        routes = watched.routes()
        before = await server.read_state()
        watched.handled.clear()
        answered = []
        for method, path in routes:
            for why, headers in OF_A_PAGE.items():
                status = await ask(server, method, path, headers)
                if status not in (401, 403) and not (name == "dashboard with a token" and path in PUBLIC):
                    answered.append((method, path, why, status))
            for why, headers in CARELESS.items():
                if method not in READS and (status := await ask(server, method, path, headers)) not in (401, 403, 415):
                    answered.append((method, path, why, status))
        assert answered == []
        assert [route for route in watched.handled if route[1] not in PUBLIC] == []
        assert await server.read_state() == before


@pytest.mark.parametrize("name", SERVERS)
async def test_every_route_serves_the_clients_of_the_run(name, watched, tmp_path, pipe, redis_url):
    async with served(name, tmp_path, pipe, redis_url) as server:
        routes = [route for route in watched.routes() if name != "dashboard" or route[0] in READS]
        assert routes
        for method, path in routes:
            watched.handled.clear()
            headers = server.headers | ({} if server.posts_forms else JSON)
            await ask(server, method, path, headers, b"not json")
            assert watched.handled == [(method, path)]


async def test_a_change_through_the_dashboard_needs_its_token(watched, tmp_path, pipe, redis_url):
    async with served("dashboard with a token", tmp_path, pipe, redis_url) as server:
        form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": server.url}
        guesses = [
            {},
            {"Authorization": "Bearer a guess"},
            {"Cookie": f"penstock-dashboard-{server.url.rpartition(':')[2]}=a guess"},
        ]
        for guess in guesses:
            assert await ask(server, "POST", "/runs/{run}/dead", form | guess, b"action=drop&reason=data") == 401
        assert await server.read_state() == 1
        known = form | {"Authorization": f"Bearer {TOKEN}"}
        assert await ask(server, "POST", "/runs/{run}/dead", known, b"action=drop&reason=data") == 303
        assert await server.read_state() == 0


@pytest.mark.parametrize("name", [name for name in SERVERS if not name.startswith("dashboard")])
async def test_a_body_that_is_nested_too_deeply_is_the_clients_fault(name, watched, tmp_path, pipe, redis_url):
    deep = b"[" * 200_000 + b"]" * 200_000
    bodies = [deep, b'{"messages": ' + deep + b"}", b'{"messages": [{"role": "user", "content": ' + deep + b"}]}"]
    bodies += [
        b'{"update_info": ' + deep + b"}",
        b'{"input": ' + deep + b"}",
        b'{"chat_template_kwargs": ' + deep + b"}",
    ]
    for shallow in (b"[" * 900 + b"]" * 900, b'{"a": ' * 900 + b"1" + b"}" * 900, b"7", b'"text"', b"[7]", b"{}"):
        bodies += [b'{"messages": [{"role": "user", "content": ' + shallow + b"}]}", b'{"messages": ' + shallow + b"}"]
        bodies += [b'{"messages": [{"role": ' + shallow + b', "content": "a"}]}']
        asked = b'{"messages": [{"role": "user", "content": "a"}], '
        bodies += [asked + b'"tools": ' + shallow + b"}", asked + b'"tools": [{"function": ' + shallow + b"}]}"]
        bodies += [b'{"messages": [{"role": "tool", "tool_call_id": ' + shallow + b', "content": "a"}]}']
    async with served(name, tmp_path, pipe, redis_url) as server:
        posts = [path for method, path in watched.routes() if method not in READS]
        for path in posts:
            for body in bodies:
                assert await ask(server, "POST", path, JSON, body) < 500, (path, body[:60])


PARAMETERS = {
    "groups": ("step", "version", "reward", "end", "prompt", "before", "at"),
    "group": ("id", "tokens", "row", "color"),
    "timeline": ("step", "before"),
    "dead": ("after", "reason", "stage", "done"),
    "dead/letter": ("id",),
    "group/message": ("id", "completion", "start"),
    "group/tokens": ("id", "completion", "tokens", "row", "start"),
}
"""Of the pages of a run."""
ODD_VALUES = [
    "9" * 5000,
    "9" * 20,
    "-1",
    "1e999",
    "nan..nan",
    "\u0661\u0661",  # digits, but not of an address
    "\u0661-\u0661",
    f"{'9' * 20}-{'9' * 20}",
    "\x00",
    "a" * 4000,
    "%",
]


async def test_no_address_makes_a_page_fail(tmp_path, pipe, redis_url):
    failed = []
    async with served("dashboard", tmp_path, pipe, redis_url) as server, aiohttp.ClientSession() as session:
        cases = [(page, name, value) for page, names in PARAMETERS.items() for name in names for value in ODD_VALUES]
        cases += [("groups?at=trainer", "before", value) for value in ODD_VALUES]
        for page, name, value in cases:
            address = f"{server.url}/runs/{tmp_path.name}/{page}{'&' if '?' in page else '?'}{urlencode({name: value})}"
            async with session.get(URL(address, encoded=True)) as response:
                if response.status == 500:  # 503 says what is wrong
                    failed.append((page, name, value[:20], response.status))
    assert failed == []


async def test_an_address_puts_no_text_on_the_page_of_dead_letters(tmp_path, pipe, redis_url):
    async with (
        served("dashboard with a token", tmp_path, pipe, redis_url) as server,
        aiohttp.ClientSession() as session,
    ):
        page = f"{server.url}/runs/{tmp_path.name}/dead"
        async with session.get(page, params={"done": "all is lost"}, headers=server.headers) as response:
            assert "all is lost" not in await response.text()
        form = {"action": "drop", "reason": "data"}
        async with session.post(page, data=form, headers=server.headers, allow_redirects=False) as response:
            next_page = server.url + response.headers["Location"]
        async with session.get(next_page, headers=server.headers) as response:
            assert "dropped 1 dead letter" in await response.text()
        async with session.get(next_page, headers=server.headers) as response:
            assert "dropped 1 dead letter" not in await response.text()


def test_every_server_of_the_product_is_in_these_tests():
    listening, others = set(), set()
    for path in sorted((ROOT / "workers").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            if called == "listen":
                listening.add(file)
            if called in {"TCPSite", "SockSite", "UnixSite", "run_app", "make_server", "create_server", "HTTPServer"}:
                others.add(file)
            if called in {"start_http_server", "start_server", "create_tcp_listener", "ThreadingHTTPServer"}:
                others.add(file)
    assert listening == set(SERVERS.values())
    assert others == {"workers/engine_api/http_connections.py"}

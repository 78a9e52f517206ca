"""Generate docs/http.md from the routes in the code: `python docs/http_page.py > docs/http.md`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# HTTP routes

With this page you can look up what each server of a run answers.

```sh
curl localhost:8000/health                                     # an engine
curl localhost:9400/ready                                      # a role with `run.metrics_address = "0.0.0.0:9400"`
curl "localhost:7077/runs/my-run/charts.json"                  # the dashboard
```

The page is generated from the code.

## What every server asks of a request

A browser sends requests to any address that its machine reaches, for any page that it shows. So each server of
Penstock's looks at three headers before a route is chosen; `workers/engine_api/http_access.py` does it for all of them.

| header | rule | otherwise |
|---|---|---|
| `Host` | one of the names below | 403 |
| `Origin` | none, as every client but a browser sends it, or the server's own | 403 |
| `Content-Type` | of all but GET and HEAD: `application/json`, also without a body. Forms only with a token | 415 |

| the server listens | its names |
|---|---|
| at a loopback address | `localhost`, loopback addresses, `run.address`, hosts of `engine.urls` |
| elsewhere | these, IP addresses, names without a dot, the machine's host name, the host that it was started with, names in `.local`, `.internal`, `.svc`, `.lan`, `.home.arpa` and `.localhost` |
| behind the dashboard's token | any |

A name in the public DNS, such as `gpu17.hpc.example.edu`, is known if it is the server's host
(`--host gpu17.hpc.example.edu`) or stands in `engine.urls` of its settings file. Jupyter and Ollama check `Host` for the
same reason. Another site may let its own name point to your machine (DNS rebinding): a browser then takes that site's
page for a page of the server.

Besides, a dashboard changes a run only with `--allow-changes` and its token (`Authorization: Bearer TOKEN`); the URLs of
an agent's episode and of weights have a secret in them. The local engine takes weights from the run's folder and from
the folder of its model. From any other path, and from a URL, it takes them only with the SHA-256 of each file, which the
trainer sends. None of this tells one program on your network from another: any program that reaches an engine's port can
pause it and send it weights, so keep these ports private.

**vLLM's own routes are not Penstock's, and none of this protects them.** vLLM's `--api-key` does not cover `/pause`,
`/resume` and `/update_weights`. What protects these is where vLLM listens: at `127.0.0.1`, as under `penstock run`, or
in a private network without browsers.

## How many connections

| limit | value |
|---|---|
| connections of a server | 1,024 (engine and reward model 4,096, metrics 256), and at most half of `ulimit -n` |
| head of the first request | 10 s; of the next one 75 s after the answer |
| body | 60 s |
| a client that does not read its answer | 60 s |

The other half of `ulimit -n` is for the process's own work. If there are too many connections, the one that has waited
longest for its client makes room for the newest, so that clients who send requests get in. If all wait for answers, a new one
waits, too. The log says so once a minute at most (`http.connections_limited`)."""  # noqa: E501
SERVERS = {
    "Local engine (`penstock serve`)": (
        "Compatible with vLLM's routes of the same names, whose answers it copies. Errors have OpenAI's form.",
        (
            "workers/local_engine/local_server.py",
            "workers/local_engine/local_server.py",
            "workers/launch/chat_api/routes.py",
        ),
    ),
    "Reward model (`penstock serve --runner pooling`)": (
        "As vLLM with `--runner pooling`: [reward models](reward-models.md).",
        ("workers/local_engine/pooling/pooling_server.py", "workers/local_engine/local_server.py"),
    ),
    "Environments with an own loop": (
        "Each episode has a key, in the header or before the route (`/KEY/v1/…`), until it ends: [agents](agents.md).",
        ("workers/rollout/agent_endpoint/endpoint.py",),
    ),
    "Weights for engines": (
        'Only with `weights.transport = "http"`: [weights](weights.md).',
        ("workers/train/publishing/http_transfer.py",),
    ),
    "Dashboard": ("Pages, and the data that they load: [dashboard](dashboard.md).", ("workers/dashboard/app.py",)),
    "Metrics and health of each role": (
        "Only with `run.metrics_address`: [metrics](metrics.md).",
        ("workers/role/metrics_server.py",),
    ),
}
METHODS = {"get": "GET", "add_get": "GET", "post": "POST", "add_post": "POST"}
TABLES = {"reads": "GET", "commands": "POST", "_PAGES": "GET", "_CHANGES": "POST"}
"""Names of the variables that hold routes."""


class Route(NamedTuple):
    """One route and the name of the function that answers."""

    method: str
    path: str
    handler: str


def routes(file: str) -> Iterator[Route]:
    """Yield the routes that a file registers."""
    tree = ast.parse((ROOT / file).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            if len(node.args) == 2 and (path := text_of(node.args[0])):
                yield Route(METHODS[node.func.attr], path, handler_name(node.args[1]))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in TABLES:
            method = TABLES[node.target.id]
            yield from (Route(method, path, handler) for path, handler in table(node.value))


def table(value: ast.expr | None) -> Iterator[tuple[str, str]]:
    """Yield path and handler of each entry of a list of pairs, or of a dict."""
    if isinstance(value, ast.Dict):
        pairs = [(key, handler) for key, handler in zip(value.keys, value.values, strict=True) if key]
    else:
        entries = value.elts if isinstance(value, ast.List) else []
        pairs = [(each.elts[0], each.elts[1]) for each in entries if isinstance(each, ast.Tuple)]
    yield from ((text_of(path), handler_name(handler)) for path, handler in pairs)


def text_of(node: ast.expr) -> str:
    """Return a path; `_RUN` of the dashboard is filled in. Empty if it is no path."""
    if isinstance(node, ast.Name) and node.id == "_RUN":
        return "/runs/{run}"
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "/runs/{run}" if isinstance(part, ast.FormattedValue) else str(ast.literal_eval(part))
            for part in node.values
        )
    value = node.value if isinstance(node, ast.Constant) else ""
    return value if isinstance(value, str) and value.startswith("/") else ""


def handler_name(node: ast.expr) -> str:
    """Return a handler's name; of `partial(handler, ...)` the handler's."""
    if isinstance(node, ast.Call):
        return handler_name(node.args[0]) if ast.unparse(node.func) == "partial" else ""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def docstrings(file: str) -> dict[str, str]:
    """Return the first paragraph of each function's docstring, of all files in this one's folder."""
    return {
        node.name: " ".join(text.split("\n\n")[0].split())
        for path in sorted((ROOT / file).parent.glob("*.py"), key=lambda path: path == ROOT / file)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node))
    }


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    for title, (text, files) in SERVERS.items():
        yield from ("", f"## {title}", "", text, "", "| route | meaning |", "|---|---|")
        for file in files:
            meanings = docstrings(file)
            for route in dict.fromkeys(routes(file)):
                yield f"| `{route.method} {route.path}` | {meanings[route.handler]} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")

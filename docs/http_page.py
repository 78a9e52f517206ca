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

Only the dashboard has a token (`Authorization: Bearer TOKEN`), and only its page for dead letters changes anything.
Engines take weights from everyone who reaches them: keep their ports private. The page is generated from the code."""
SERVERS = {
    "Local engine (`penstock serve`)": (
        "Compatible with vLLM's routes of the same names, whose answers it copies. Errors have OpenAI's form.",
        ("workers/local_engine/server.py", "workers/local_engine/info_routes.py"),
    ),
    "Reward model (`penstock serve --runner pooling`)": (
        "As vLLM with `--runner pooling`: [reward models](reward-models.md).",
        ("workers/local_engine/pooling/server.py", "workers/local_engine/info_routes.py"),
    ),
    "Environments with an own loop": (
        "Each episode has a URL of its own, and takes requests of OpenAI's clients there until it ends.",
        ("workers/rollout/agent_endpoint/endpoint.py",),
    ),
    "Weights for engines": (
        'Only with `weights.transport = "http"`: [weights](weights.md).',
        ("workers/train/publishing/http_transfer.py",),
    ),
    "Dashboard": ("Pages, and the data that they load: [dashboard](dashboard.md).", ("workers/dashboard/server.py",)),
    "Metrics and health of each role": (
        "Only with `run.metrics_address`: [metrics](metrics.md).",
        ("workers/runtime/metrics_server.py",),
    ),
}
METHODS = {"get": "GET", "add_get": "GET", "post": "POST", "add_post": "POST"}
TABLES = {"reads": "GET", "commands": "POST", "_PAGES": "GET", "_CHANGES": "POST", "pages": "GET"}
"""Names of the variables that hold routes."""
PAGES = {
    "/metrics": "Metrics in Prometheus' text format.",
    "/health": "200 while the role works; 503 with the reason if it is stuck; no answer while user code holds Python's "
    "interpreter lock.",
    "/ready": "200 if the role can take work; 503 with the reason.",
    "/targets": "Of `penstock run`: the processes to scrape, for Prometheus' HTTP service discovery.",
}
"""Routes without a function of their own."""


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
        elif (
            isinstance(node, ast.Compare)
            and ast.unparse(node.left) == "path"
            and (path := text_of(node.comparators[0]))
        ):
            yield Route("GET", path, "")  # the metrics server


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
                meaning = meanings[route.handler] if route.handler else PAGES[route.path]
                yield f"| `{route.method} {route.path}` | {meaning} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")

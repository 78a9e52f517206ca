"""Which engines there are, and how they come by weights."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from workers.settings.settings import Settings
from workers.settings.training import LOOPBACK_HOSTS


def check_engines(s: Settings) -> Iterator[str]:
    """`[engine]`: those that are named, and those that are started."""
    least, most = s.engine.min_concurrency, s.engine.max_concurrency
    if least > most:
        yield f"engine.min_concurrency is {least} and engine.max_concurrency is {most}; make the first the smaller one"
    if s.engine.dns.startswith("https:"):
        yield (
            "engine.dns is https, but the engines behind a name are reached by their addresses, for which no "
            "certificate holds; write http, or name each engine in engine.urls"
        )
    yield from _check_started_engines(s)


def _check_started_engines(s: Settings) -> Iterator[str]:
    engine = s.engine
    named = "engine.urls" if engine.urls else "engine.dns" if engine.dns else ""
    for key in engine.non_default("count", "devices"):
        if named:
            yield f"engine.{key} is set, but {named} names the engines, so that none is started; leave one of them out"
    for key in engine.non_default("python", "flags"):
        if engine.server == "local":
            yield f"engine.{key} is vLLM's, but engine.server is 'local'; set that to 'vllm', or leave the first out"
    if engine.devices and len(engine.devices) != engine.count:
        yield (
            f"engine.devices is for {len(engine.devices)} engines and engine.count is {engine.count}; name the GPUs of "
            "each engine, or of none"
        )


def check_weights(s: Settings) -> Iterator[str]:
    """`[weights]`: how engines reach the trainer."""
    weights = s.weights
    if weights.port and weights.transport != "http":
        yield (
            f"weights.port is of the server that weights.transport = 'http' starts, not {weights.transport!r}; set the "
            "second to it, or leave the first out"
        )
    if weights.transport == "files" and weights.non_default("host"):
        yield "weights.host is set, but with weights.transport = 'files' nobody asks the trainer; leave it out"
    away = [url for url in (*s.engine.urls, s.engine.dns) if url and urlsplit(url).hostname not in LOOPBACK_HOSTS]
    if weights.transport != "files" and weights.host in LOOPBACK_HOSTS and away:
        yield (
            f"weights.host is {weights.host!r}, by which {away[0]} does not reach the trainer; set it to a name or "
            "address of the trainer's machine on the engines' network"
        )

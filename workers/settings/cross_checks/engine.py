"""Checks of `[engine]` and `[weights]`."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from workers.settings.engine import DNS_PREFIX, FILE_PREFIX
from workers.settings.settings import Settings
from workers.settings.training import LOOPBACK_HOSTS


def is_http_url(text: str) -> bool:
    """Return whether a text is `http://HOST...` or `https://HOST...`."""
    try:
        parts = urlsplit(text.strip())
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)


def check_engines(s: Settings) -> Iterator[str]:
    """`[engine]`: engines are either named or started."""
    engine = s.engine
    for url in engine.named_urls:
        if not is_http_url(url):
            yield f"engine.urls: {url!r} is not the URL of an engine; write it as http://HOST:PORT"
    if FILE_PREFIX in engine.urls:
        yield f"engine.urls: {FILE_PREFIX!r} names no file; write {FILE_PREFIX}PATH"
    if any(url.startswith(f"{DNS_PREFIX}https:") for url in engine.urls):
        yield (
            f"engine.urls has {DNS_PREFIX}https, but engines behind a name are reached by address, for which no "
            "certificate is valid; write http, or list the engines one by one"
        )
    for key in engine.non_default("count", "devices"):
        if engine.urls:
            yield f"engine.{key} is set, but engine.urls names the engines, so none is started; leave one of them out"
    for key in engine.non_default("python", "flags"):
        if engine.server == "local":
            yield f"engine.{key} is for vLLM, but engine.server is 'local'; set that to 'vllm', or leave the first out"
    if engine.devices and engine.server == "local" and not engine.urls:
        yield (
            "engine.devices names GPUs for vLLM, but engine.server is 'local', which computes on the CPU; set that to "
            "'vllm', or leave the first out"
        )
    elif engine.devices and len(engine.devices) != engine.count:
        yield (
            f"engine.devices is for {len(engine.devices)} engines and engine.count is {engine.count}; name the GPUs of "
            "each engine, or of none"
        )


def check_weights(s: Settings) -> Iterator[str]:
    """`[weights]`: engines can reach the weights."""
    weights = s.weights
    if weights.transport == "adapter":
        if not s.lora.rank:
            yield "weights.transport is 'adapter', but lora.rank is 0, so there is no adapter; set one of the two"
        if weights.kv_cache == "keep":
            yield (
                "weights.kv_cache is set, but with weights.transport = 'adapter' running requests keep their adapter; "
                "leave the first out"
            )
    remote = [url for url in s.engine.named_urls if is_http_url(url) and urlsplit(url).hostname not in LOOPBACK_HOSTS]
    if weights.transport in {"http", "nccl"} and s.run.host in LOOPBACK_HOSTS and remote:
        yield (
            f"run.address is {s.run.address!r}, by which {remote[0]} cannot reach the trainer for weights.transport = "
            f"{weights.transport!r}; set it to a name or address of the trainer's machine on the engines' network"
        )

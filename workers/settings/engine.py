"""Settings of the engines: which there are, and how they are asked."""

from workers.settings.section import Positive, Seconds, Section


class Engine(Section, frozen=True):
    """`[engine]`: who samples tokens."""

    urls: tuple[str, ...] = ()
    """Servers that speak vLLM's HTTP API. Empty: `penstock run` starts the local engine on a free port."""
    dns: str = ""
    """`http://NAME:PORT`, whose every address is an engine as well, asked for again every few seconds."""
    min_concurrency: Positive = 8
    """Requests of a rollout worker that one engine gets at least, however busy it says it is."""
    max_concurrency: Positive = 512
    """Requests of a rollout worker that one engine works on at once, at most; how many between the two, its own figures
    decide."""
    request_timeout_s: Seconds = 300.0
    """For one turn."""
    attempts: Positive = 3
    """Tries of one request before its completion is invalid."""
    max_batch: Positive = 128
    """Local engine: sequences decoded together."""
    max_length: Positive = 1024
    """Local engine: tokens of a sequence, prompt included."""
    threads: Positive = 1
    """Local engine: torch threads."""

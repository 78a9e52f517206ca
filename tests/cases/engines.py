"""Clients of scripted engines."""

from workers.rollout.engine_client.client import EngineClient


def client_of(
    *engines: object, attempts: int = 3, timeout_s: float = 5, reconnect_s: float = 5, **more: object
) -> EngineClient:
    """Return a client, not entered yet, of these engines.

    Args:
        engines: scripted engines, URLs, or one discovery.
        attempts: of each request.
        timeout_s: of each attempt.
        reconnect_s: how long to wait for an engine.
        more: other arguments of the client.
    """
    first, *_ = found = [getattr(engine, "url", engine) for engine in engines]
    urls = found if isinstance(first, str) else first
    return EngineClient(
        urls, request_timeout_s=timeout_s, max_attempts=attempts, unavailable_timeout_s=reconnect_s, **more
    )

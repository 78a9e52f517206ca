"""Client of the engines: it chooses an engine for each request, and retries elsewhere if that fails.

Requests go over HTTP through `workers/engine_api/connection_pool.py`, as the trainer's do.
"""

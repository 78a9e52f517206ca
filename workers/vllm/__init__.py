"""Starts a vLLM server, watches it, and stops it together with all its child processes.

Nothing here imports vLLM: vLLM pins versions that Penstock does not, so it has a separate virtual environment.
"""

"""Sandboxes: programs that see nothing of this machine but the system's files, and containers that an episode owns.

`contract` says what a provider of sandboxes has to do. `bubblewrap` starts programs with the filter of `system_calls`.
"""

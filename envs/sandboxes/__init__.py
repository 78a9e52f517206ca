"""Sandboxes: programs that see nothing of this machine but the system's files.

`process` runs them with bubblewrap, `system_calls` is the filter that it gives them.
"""

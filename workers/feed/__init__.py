"""The feeder: rows of a prompt file become prompts in the backlog.

`source` reads files, `mapping` turns a row into a prompt, `worker` feeds them and remembers where it stands.
"""

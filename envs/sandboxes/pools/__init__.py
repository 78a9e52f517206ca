"""Long-lived child processes with a queue of jobs, for code that hangs, crashes, leaks or runs what a model wrote.

::

    ProcessPool ─ jobs ─► child in a sandbox (`isolation`) ─ fork for one job (`forked`) ─► result, or why there is none
"""

"""Child processes with limits: a killable worker pool, and the launcher of the Python sandbox."""

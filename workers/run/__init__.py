"""One machine, one command: `penstock run` starts every role, watches them, and stops them.

::

    command ──► folder (lock, run.toml) ──► private server ──► engine ──► feed, rollout xN, score xM, train
                                                │                            each a child: restarted within a budget
                                                └──► watch, once a second ──► progress, stall alarm
                                                                         end ──► summary.json, progress.png

The supervisor does none of the work and holds none of the state: kill it, start it again, and the run goes on.
"""

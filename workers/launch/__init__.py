"""`penstock run`: start every role of a run on one machine, restart roles that fail, and stop them in order.

::

    command ──► folder (lock, run.toml) ──► private server ──► engine, feed, score xM ──► rollout xN, train
                                                │                            child processes, restarted within a budget
                                                └──► watch, once a second ──► progress, stall alarm
                                                                         end ──► summary.json, progress.png

The supervisor holds no state of the run: after it is killed, `penstock run` resumes the run.
"""

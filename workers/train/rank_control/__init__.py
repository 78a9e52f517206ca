"""Several processes (ranks) that are one trainer, with the model in shards over them.

::

    launcher ─► rank 0: the trainer, with a `Rank0Learner` ─── commands ───► ranks 1, 2, ...: followers
                   └──────── every step: the same collectives (`workers.train.distributed`) ────────┘

===================  ==================================================================
`launcher.py`        starts the ranks on this machine with the agent of `torchrun`
`commands.py`        what rank 0 tells the followers, and how
`rank0.py`           the trainer as rank 0: its learner broadcasts each command first
`follower.py`        the other ranks: execute commands until `Shutdown`
===================  ==================================================================
"""

"""Several processes (ranks) that are one trainer, with the model in shards over them.

::

    launcher ─► rank 0: the trainer, with a `Rank0Learner` ─── commands ───► ranks 1, 2, ...: followers
                   └──────── every step: the same collectives (`workers.train.ranks`) ────────┘
"""

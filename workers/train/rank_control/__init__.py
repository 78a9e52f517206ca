"""Several processes that are one trainer, with the model in shards over them.

::

    launching ─► rank 0: leading, the trainer as it is alone ──── orders ────► rank 1..: following
                   └────────────── every step: the same collectives (ranks, sharding) ──────┘

===================  ==================================================================
`launching.py`       starts them on this machine, by the agent of `torchrun`, and ends them together
`ranks.py`           which of them this is, and what they add up
`sharding.py`        a model in shards, one at each
`leading.py`         the first: a learner that takes the others along
`orders.py`          what it tells them, and how they hear of it
`following.py`       each of the others: does what it is told
===================  ==================================================================
"""

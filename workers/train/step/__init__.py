"""One optimizer batch, from records to moved weights. Nothing here knows of streams, or waits.

::

    groups ─► batch ─► forming ──────────────────────────────────► learner: updates of micro-batches ─► report
                        selection   masks, verdicts                   ▲ passes: forward, loss, backward
                        survey      what the model says now  ◄────────┘
                        estimation  rewards made ready, advantages
                        objective   what the loss is made from

===================  ==================================================================
`batch.py`           groups as tensors, and their micro-batches
`reward_parts.py`    what rewards are made of, read from records
`selection.py`       masks and verdicts under a run's settings
`forming.py`         everything that is decided of a batch before its first gradient
`survey.py`          what a pass without gradient sees of it
`estimation.py`      rewards made ready, the estimator called: advantages
`objective.py`       every tensor that the loss of a micro-batch is made from
`passes.py`          the policy, the reference and the critic over rows: survey, forward and backward
`learner.py`         model and optimizer: one batch in, one step done
`optimizer.py`       AdamW: its rates, its state by name
`tally.py`           what the updates of a batch add up to
`report.py`          what became of it
`metrics.py`         the numbers of that report, by name
===================  ==================================================================

`selection`, `estimation` and `objective` are where `algorithms` meets the settings, `passes` where it meets the model.
"""

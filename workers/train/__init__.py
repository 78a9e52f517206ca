"""The trainer: scored groups in, policy versions out.

::

    [scored] ─► groups ─► step ──────────────────────────► publishing ─► engines, policy v+1
                              batch ─► masks ─► advantages ─► loss ─► optimizer
                                                            └─► checkpointing ─► checkpoint

Rooms, from high to low; each imports only those below it (an import contract checks this):

==================  ==================================================================
`rank_control/`     several processes that are one trainer
`worker.py`         the role: resumes from the newest checkpoint and trains to the end
`trainer.py`        the loop: collect, step, publish, checkpoint
`checkpointing/`    checkpoints, export, replay
`evaluation/`       begins evaluations and writes their results
`publishing/`       weights to the engines while they serve requests
`groups/`           checks groups, collects the next step, waits for stragglers
`step/`             one optimizer batch, from records to updated weights
`model/`            the policy: loaded and written, its log-probs, adapter, critic
`algorithms/`       the mathematics: tensors in, tensors out
`distributed/`      ranks and sharded tensors
`progress.py`       counts over the whole run, stored in each checkpoint
`metrics_log.py`    `metrics.jsonl`
==================  ==================================================================

Axes in names: C completions, R rows, T tokens of a row, G groups, P parts of a reward, M rows of one micro-batch, N
tokens with loss.
"""

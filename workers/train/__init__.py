"""The trainer: scored groups in, policy versions out.

::

    [scored] ─► groups ─► step ─────────────────────────────────────────────► publishing ─► engines, policy v+1
                  │        batch ─► selection ─► estimation ─► objective ─►    weights
      archive,    │        facts    masks B, L   rewards,      proximal, loss, in flight    keeping ─► checkpoint,
      ledger line, mark    tokens   filters      advantages    optimizer                               metrics
                  ◄── each end              model, by micro-batch ──┘

===================  ==================================================================
`worker.py`          the role: begins where the newest checkpoint left off, and ends
`trainer.py`         what it does between steps: collect, step, publish, keep
`groups/`            groups, from the claim to the end of each: what a step takes, what it waits for, what it leaves
`step/`              one optimizer batch, from records to moved weights
`algorithms/`        the mathematics: tensors in, tensors out, nothing known of streams, settings or models
`model/`             the policy: read and written, its log-probs, the adapter in it, the critic on it
`ranks/`             several processes that are one trainer
`publishing/`        weights to the engines while they run
`keeping/`           what is kept on disk, and what can be made of it later
`evaluation/`        its part in evaluations, and their figures
===================  ==================================================================

Axes in names: C completions, R rows, T tokens of a row, G groups, P parts of a reward, M rows of one micro-batch, N
tokens that bear loss.
"""

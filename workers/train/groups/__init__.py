"""The trainer's groups, from the claim to the end of each.

::

    [scored] ─► collecting ─► hand ────────────────► a full step (`Trainer`) ─┐
                              not worth training ───────────────────────────┴─► endings ─► archive, ledger line, mark

===================  ==================================================================
`collecting.py`      claims and judges until a step is full, or nothing more will come
`hand.py`            the groups held meanwhile, and what was dropped
`lateness.py`        which groups a step takes, and which it waits for
`stragglers.py`      for whom it waits now, and how long
`guard.py`           stops a run whose rewards are not measured any more
`endings.py`         what a group's end leaves behind
`attempts.py`        how long attempts at groups took
===================  ==================================================================
"""

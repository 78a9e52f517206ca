"""The trainer: scored groups in, policy versions out.

::

    [scored] ─► groups ─► step ──────────────────────────► publishing ─► engines, policy v+1
                              batch ─► masks ─► advantages ─► loss ─► optimizer
                                                            └─► checkpointing ─► checkpoint

Axes in names: C completions, R rows, T tokens of a row, G groups, P parts of a reward, M rows of one micro-batch, N
tokens with loss.
"""

"""The trainer: scored groups in, policy versions out.

::

    groups ─► batch ─► masks ─► advantages ─► logprobs ─► losses ─► optimizer ─► weights
              facts    B, L     by group id   of sampled   one denominator       checkpoint,
              tokens   tokens                 tokens only  for the whole batch   publication

The maths (`grouping`, `masks`, `advantages`, `losses`, `schedule`) is pure: tensors in, tensors out, and nothing known
of streams, settings or models. `learner` joins it to a model and an optimizer; the worker joins that to the streams.

Axes in names: C completions, R rows, T tokens of a row, G groups, M rows of one micro-batch, N tokens that bear loss.
"""

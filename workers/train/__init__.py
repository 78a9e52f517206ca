"""The trainer: scored groups in, policy versions out.

::

    groups ─► batch ─► selection ─► estimation ─► objective ─────► optimizer ─► weights
              facts    masks B, L   rewards,      proximal, loss,   learner     checkpoint,
              tokens   filters      advantages    by micro-batch                publication

Pure functions are in `algorithms`: tensors in, tensors out, nothing known of streams, settings or models. `selection`,
`estimation` and `objective` are where they meet the settings, `logprobs`, `critic` and `survey` where the model comes
in; `learner` joins it all to an optimizer, and the worker joins that to the streams.

Axes in names: C completions, R rows, T tokens of a row, G groups, P parts of a reward, M rows of one micro-batch, N
tokens that bear loss.
"""

"""The policy as a model: on disk, in memory, and its log-probs of tokens.

::

    rows of tokens ─► logprobs, attention ─► layers ─► hidden states ─► lm_head ─► logit_blocks ─► log-probs
                      padded or packed        adapter        └─► critic ─► values   blocks of logits
"""

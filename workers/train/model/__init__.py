"""The policy as a model: on disk, in memory, and what it says of tokens.

::

    rows of tokens ─► layout, varlen ─► layers (recomputing, adapter) ─► hidden states ─► head ─► chunked ─► log-probs
                      padded or packed  what they keep for backward          └─► critic ─► values   blocks of logits

===================  ==================================================================
`trained.py`         the model that is trained: in memory, in shards, on disk
`policy.py`          a folder in Hugging Face form, read and written
`adapter.py`         LoRA: an adapter in it, which alone is trained
`logprobs.py`        what the model says of chosen tokens, and of no others
`head.py`            its end: from the last hidden states to logits
`blocks.py`          logits out of both, a block at a time
`chunked.py`         log-probs out of those, and gradients back through them
`layout.py`          rows padded to one length, or packed one behind another
`packing.py`         whether they may be packed, and with which attention
`varlen.py`          attention over packed rows
`recomputing.py`     gradient checkpointing: layers that make their activations again
`critic.py`          a value head on the last hidden states
`sharded_model.py`   the model sharded over ranks
===================  ==================================================================
"""

"""The policy as a model: on disk, in memory, and its log-probs of tokens.

::

    rows of tokens ─► input_layout, varlen ─► layers ─► hidden states ─► lm_head ─► chunked ─► log-probs
                      padded or packed        adapter        └─► critic ─► values   blocks of logits

=============================  ==============================================================
`trainable_model.py`           the model in training: in memory, sharded, on disk
`policy_folder.py`             a folder in Hugging Face form
`adapter.py`                   LoRA
`sharded_model.py`             the model sharded over ranks
`logprobs.py`                  log-probs of selected tokens
`lm_head.py`                   the output layer and the transform after it
`logit_blocks.py`              logits of one block
`chunked.py`                   log-probs block by block, and their gradients
`input_layout.py`              model inputs from rows, padded or packed
`packing.py`                   whether rows can be packed, and with which attention
`varlen.py`                    attention over packed rows
`activation_checkpointing.py`  recomputing activations in the backward pass
`critic.py`                    value head
=============================  ==============================================================
"""

"""The local engine: vLLM's HTTP API over a Hugging Face model, for laptops, CI and small models.

::

    event loop                                generation thread, owns the model
    ──────────                                ─────────────────────────────────
    local_server ── model_thread ──► mailbox ──► scheduler: admit ► prefill ► decode one token for all ► sample
        ▲                                                  │       slot_model, kv_cache, token_sampling
        └────── one call into the loop per step ◄──────────┘

`pooling/` serves a sequence classifier, for example a reward model. Importing the package does not import torch.
"""

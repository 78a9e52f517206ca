"""The local engine: vLLM's HTTP API over a Hugging Face model, for laptops, CI and small models.

::

    event loop                                generation thread (owns the model)
    ──────────                                ─────────────────────────────────
    server.py ── Generation, Order ──► mailbox ──► scheduler.py: admit ► prefill ► decode one token for all ► sample
        ▲                                                            │     admission.py, model.py, cache.py, sampling.py
        └────── one call into the loop per step ◄── finished ────────┘

`wire.py` holds what goes over HTTP, `connection.py` how clients ask, `site.py`, `owner.py` and `facts.py` what all
such servers share, `model_folder.py` loads a model whole or not at all, `weights.py` brings new weights into the live
one, `prefixes.py` remembers the keys and values of finished sequences for the next turn of the same episode. `pooling/`
serves a sequence classifier, a reward model for one, and `vllm/` starts vLLM instead; `choice.py` tells which of them
serves a model. Importing the package loads no torch.
"""

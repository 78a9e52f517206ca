"""The local engine: vLLM's HTTP API over a Hugging Face model, for laptops, CI and small models.

::

    event loop                                generation thread, owns the model
    ──────────                                ─────────────────────────────────
    server.py ── messages.py ──► mailbox ──► scheduler.py: admit ► prefill ► decode one token for all ► sample
        ▲                                                  │     admission.py, slot_model.py, kv_cache.py, sampling.py
        └────── one call into the loop per step ◄──────────┘

`model_thread.py` connects event loop and thread. `info_routes.py` has the routes that every model server shares.
`model_folder.py` loads a model, `weight_download.py` downloads new weights, and `weight_loader.py` copies them into the
running model. `prefix_cache.py` finds the cached keys and values of finished sequences for the next turn of the same
episode. `pooling/` serves a sequence classifier, for example a reward model. Importing the package does not import
torch.
"""

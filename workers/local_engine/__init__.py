"""The local engine: vLLM's HTTP API over a Hugging Face model, for laptops, CI and small models.

::

    event loop                                generation thread, owns the model
    ──────────                                ─────────────────────────────────
    server.py ── messages.py ──► mailbox ──► scheduler.py: admit ► prefill ► decode one token for all ► sample
        ▲                                                  │     admission.py, slot_model.py, kv_cache.py, sampling.py
        └────── one call into the loop per step ◄──────────┘

`model_thread.py` connects the two, `info_routes.py` has the routes of every model server, `model_folder.py` loads a
complete model or none, `weight_loader.py` copies new weights into the running model, `weight_download.py` fetches them,
`prefix_cache.py` keeps the keys and values of finished sequences for the next turn of the same episode. `pooling/`
serves a sequence classifier, for example a reward model. Importing the package loads no torch.
"""

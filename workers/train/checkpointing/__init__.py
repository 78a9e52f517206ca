"""Saves checkpoints, copies them to object storage, exports models from them, and replays runs.

=================  ========================================================================
`checkpoint.py`    weights and optimizer state, written atomically and verified
`export.py`        a trained policy as an ordinary model folder
`object_store.py`  a copy of the run in object storage
`replayer.py`      repeats a finished run from its ledger and archive, and compares its weights
=================  ========================================================================
"""

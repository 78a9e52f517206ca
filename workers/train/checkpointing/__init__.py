"""Saves checkpoints, exports models from them, and replays runs.

===============  ========================================================================
`checkpoint.py`  weights and optimizer state, written atomically and verified
`export.py`      a trained policy as an ordinary model folder
`replayer.py`    repeats a finished run from its ledger and archive, and compares its weights
===============  ========================================================================
"""

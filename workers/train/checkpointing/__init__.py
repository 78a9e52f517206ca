"""Saves checkpoints, exports models from them, and replays runs.

=======================  ==================================================================
`checkpoint.py`          weights and optimizer state, written atomically and verified
`export.py`              a trained policy as an ordinary model folder
`replay.py`              repeats a finished run from its ledger and archive
`replay_comparison.py`   compares the learner of a replay with a checkpoint, bit for bit
=======================  ==================================================================
"""

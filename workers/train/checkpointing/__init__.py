"""What the trainer keeps in the run's folder, and what can be made of it later.

===================  ==================================================================
`checkpoint.py`      weights and optimizer state, whole and verified
`progress.py`        how far the run has come: kept in each checkpoint
`journal.py`         `metrics.jsonl`, cut to what a checkpoint knows of
`durable.py`         folders that are there whole, or not at all
`export.py`          a trained policy as an ordinary model folder
`replay.py`          a finished run done again from its books
`agreement.py`       what comes out of that against a checkpoint, bit for bit
===================  ==================================================================
"""

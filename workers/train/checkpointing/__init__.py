"""Saves checkpoints, copies them to object storage, exports models from them, and replays runs."""

"""Evaluation without a run: the held-out prompts through a run's own episode loop and rewards, without the streams."""

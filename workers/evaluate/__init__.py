"""Policies and rewards measured without a run: held-out prompts, played episodes, archived groups, pairs."""

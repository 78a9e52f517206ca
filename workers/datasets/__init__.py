"""Prompt files as prompts: a row becomes a prompt, and several data sets are mixed in a reproducible order."""

"""The scoring stage: calls reward functions on thawed snapshots, merges the parts of each reward."""

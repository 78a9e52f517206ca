"""The scoring stage: calls reward functions on restored environments and merges the parts of each reward."""

"""Built-in environments and reward functions, one file each, named by entry points.

A new one is a file here, and a line in pyproject.toml under "penstock.environments" or "penstock.rewards".
"""

"""Rewards measured by HTTP servers."""

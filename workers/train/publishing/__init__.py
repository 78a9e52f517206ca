"""Weights to the engines while they serve requests."""

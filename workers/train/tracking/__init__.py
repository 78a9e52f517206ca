"""Trackers: services and files that get each step's metrics, besides `metrics.jsonl`."""

"""Stand-ins for those who test environments, or the pipeline itself. No torch."""

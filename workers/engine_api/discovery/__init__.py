"""Discovery of a run's engines from settings, DNS and the operator's overrides; normalization of their URLs."""

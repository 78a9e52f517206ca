"""Discovery of a run's engines, which `engine.urls` names one by one, by a DNS name, or in a file."""

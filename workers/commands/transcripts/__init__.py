"""`penstock show` and `penstock export-groups`: read a run's completions."""

"""`penstock eval`: measure a policy on held-out prompts with a run's own episode loop and rewards, without a run."""

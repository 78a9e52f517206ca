"""`penstock eval`: measure a policy on held-out prompts without a run, with the same episode loop and rewards."""

"""`penstock rescore`: score a run's archived groups with other reward functions and compare the rewards."""

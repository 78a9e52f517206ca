"""`penstock eval`: measure a policy on held-out prompts without a run, with the same episode loop and rewards.

`penstock play`: play an environment against a model, without a run: no trainer, no Redis, no settings file.

`penstock rescore`: score a run's archived groups with other reward functions and compare the rewards.

`penstock rewardbench`: measure how often a served reward model prefers the better answer of a pair.
"""

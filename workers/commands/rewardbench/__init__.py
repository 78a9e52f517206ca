"""`penstock rewardbench`: measure how often a served reward model prefers the better answer of a pair."""

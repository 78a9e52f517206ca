"""The feeder: prompts of a run's data sets become entries of the backlog, and its position is remembered."""

"""A run in the terminal: tables and conversations made of the values of `workers.runs`, and of nothing else."""

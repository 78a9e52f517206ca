"""The feeder: rows of prompt files become prompts in the backlog.

`source` reads files, `dataset_mix` orders the rows of all datasets, `row_mapping` turns a row into a prompt, `worker`
feeds the prompts and remembers its position, `evaluation_prompts` uploads the prompts of evaluations.
"""

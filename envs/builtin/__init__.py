"""Built-in environments and reward functions, one file each, named by entry points.

To add one: a file here, and a line in pyproject.toml under "penstock.environments" or "penstock.rewards".

=======================  ====================================================================
`calculator`             three tools for whole numbers; `calculator_answer`, the demo's reward
`guess`                  guess a number
`python`                 `python_sandbox.py`: run the model's Python in a sandbox with limits
`math`                   `math_verifier.py`: mathematical equality with the gold answer
`vlm`                    weighted reward parts for image prompts
`code_jaccard`           similarity of two pieces of code
`gold_answers.py`        the column with the gold answers, shared by these rewards
=======================  ====================================================================
"""

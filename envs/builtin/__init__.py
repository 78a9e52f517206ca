"""What comes with the package: environments and reward functions, a file each, named by entry points.

Another one is a file here, and a line in pyproject.toml under "penstock.environments" or "penstock.rewards".

=======================  ====================================================================
`calculator`             three tools for whole numbers; `calculator_answer`, the demo's reward
`guess`                  a number to be guessed
`python`                 `python_sandbox.py`: the model's Python in a child with limits
`math`                   `math_verifier.py`: the same expression as the gold answer
`vlm`                    parts for image prompts
`code_jaccard`           how alike two pieces of code are
`golds.py`               what those with gold answers have in common
=======================  ====================================================================
"""

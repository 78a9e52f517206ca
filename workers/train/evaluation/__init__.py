"""The trainer's part in evaluations.

===================  ==================================================================
`evaluating.py`      begins them, holds publications meanwhile, writes down what came of them
`figures.py`         pass@k and mean reward over both denominators, by environment; `eval.jsonl`
===================  ==================================================================
"""

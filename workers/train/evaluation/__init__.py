"""The trainer's part in evaluations.

===================  ==============================================================================
`scheduler.py`       begins and ends evaluations, and delays publications while one is sampled
`results.py`         pass@k and mean reward over both denominators, by environment; `eval.jsonl`
===================  ==============================================================================
"""

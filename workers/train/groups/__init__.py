"""Scored groups on their way to a step: checked, collected, waited for.

===============================  ========================================================================
`collector.py`                   polls the consumer until a step is full, or no more groups will come
`group_checker.py`               decides whether a group is worth training on; counts the dropped ones
`step_plan.py`                   which groups a step takes, and which it waits for
`straggler_wait.py`              how long the current step has been waiting, and for which groups
`no_loss_monitor.py`             stops a run in which too many completions bear no loss
===============================  ========================================================================
"""

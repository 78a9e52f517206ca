"""Preflight: everything that can be tested before an engine starts, with all faults in one report.

=====================  ==========================================================================
`preflight.py`         runs all checks for the settings of a run
`findings.py`          a finding, the report, and its text
`model_check.py`       the model's folder: files, weights, size
`chat_check.py`        chat template with the tools; prompts against `engine.max_model_len`
`data_check.py`        prompt files and their first rows
`environment_check.py` makes and resets each environment
`task_check.py`        whether the completions of one group get one task
`reward_check.py`      calls each reward function on scripted completions
`machine_check.py`     disk, memory, ports, Redis, engines, installed packages
`preflight_process.py` runs the checks in a process of their own, before `penstock run` starts anything
=====================  ==========================================================================

An error means that the run cannot work; a warning, that it probably does not do what was meant.
"""

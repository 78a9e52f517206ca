"""`penstock check`: try an environment, a reward function or all of a run's settings, and report the problems.

=======================  ===============================================
`check.py`               the command for an environment or a reward function
`run_check.py`           the command for a settings file
`environment_check.py`   plays an episode in an environment
`reward_check.py`        calls a reward function with sample rows
`check_report.py`        the report
`rendering.py`           formats the report for a terminal
=======================  ===============================================
"""

from workers.commands.check.check import check_reference
from workers.commands.check.environment_check import check_environment
from workers.commands.check.rendering import render_report
from workers.commands.check.reward_check import check_reward

__all__ = ("check_environment", "check_reference", "check_reward", "render_report")

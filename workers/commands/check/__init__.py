"""`penstock check REF`: try an environment, or a reward function, without a model, and say what will go wrong with it.

==================  ==================================================
`environment.py`    plays an episode
`reward.py`         calls a reward function with made-up rows
`report.py`         what was found out
`show.py`           the same for people
`command.py`        the command
==================  ==================================================
"""

from workers.commands.check.check import check_reference
from workers.commands.check.environment_check import check_environment
from workers.commands.check.rendering import render_report
from workers.commands.check.reward_check import check_reward

__all__ = ("check_environment", "check_reference", "check_reward", "render_report")

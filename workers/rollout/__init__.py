"""Rollout workers: prompts in, groups of completions out.

::

    worker ─► group ─► episode: reset, turns, reward, snapshot ─┬─► conversation    turns driven by this worker
                                                                └─► agent_endpoint  turns driven by the environment
    episode ─► environment_slot (user code, with deadlines) · chat (messages as tokens) · engine_client (sampling)
"""

"""Rollout workers: prompts in, groups of completions out.

======================  =======================================================================================
`worker.py`             the role: many groups concurrently; `evaluation.py` does the same for evaluations
`stale_canceller.py`    cancels attempts that newer policies made too old
`group.py`              all completions of one prompt
`episode_base.py`       one completion: reset, turns, reward, snapshot
`episode.py`            its turns, driven by this worker
`environment_replies.py`  what it says after a turn: results of tools, or its `respond`
`agent_endpoint/`       its turns, driven by the environment, which asks an endpoint for each of them
`environment_slot.py`   one environment instance, with a deadline around every call; `environment_pool.py` shares them
`row_builder.py`        tokens of a completion under construction
`messages.py`           messages of a completion
`tool_result.py`        a tool's return value, as the model reads it
`tool_formats/`         parsers of the tool calls that models write
`chat/`                 messages as text and token ids
`engine_client/`        sampling from engines
======================  =======================================================================================
"""

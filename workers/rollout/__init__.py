"""Rollout workers: prompts in, groups of completions out.

`engine` asks for tokens, `template` and `chat` turn messages into token ids, `tool_format` reads tool calls, `slot`
holds an environment and bounds the calls into it, `episode` plays one completion whose row grows in a `draft`, `group`
plays all completions of a prompt, `worker` many groups at once.
"""

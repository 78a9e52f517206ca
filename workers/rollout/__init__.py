"""Rollout workers: prompts in, groups of completions out.

`engine` asks for tokens, `template` and `chat` turn messages into token ids, `tool_format` reads tool calls, `call` and
`slot` run an environment's code with deadlines, `episode` plays one completion, `group` all of a prompt, `worker` many
groups at once.
"""

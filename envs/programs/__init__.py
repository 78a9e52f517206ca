"""Agent programs as environments: any command that asks a model by OpenAI's or Anthropic's API.

`agent_program` starts it in a sandbox, `inside` is what runs there before it, and passes its connections on.
"""

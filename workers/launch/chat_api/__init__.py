"""OpenAI's chat completions on the local engine, for clients of the ecosystem.

`routes.py` renders a conversation as a rollout does, samples token ids with the engine, and turns them into messages
(`choice.py`), whole or as server-sent events. `request.py` says which parameters are known.
"""

"""Episodes of environments that run their own loop: they ask an endpoint for every turn of the model.

======================  ============================================================
`agent_episode.py`      one episode
`endpoint.py`           an OpenAI-compatible URL for each episode
`recorder.py`           samples the turns, and records them as rows
`openai_messages.py`    converts messages between programs and chat templates
======================  ============================================================
"""

"""The engine's client.

===================  ================================================================
`client.py`          asks, and asks again where that may help
`known_engine.py`    what it knows of each engine: load, policy version, what is awaited
`probe.py`           what an engine is and can do, found out by asking it
`route.py`           a way to ask for tokens: `generate.py`, else `completions.py`
`sampling.py`        one turn asked for: how, by whom, and what a failure says of the episode
`answer.py`          what is believed of an answer
`connection.py`      requests over HTTP, and what a broken one means
===================  ================================================================
"""

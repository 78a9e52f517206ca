"""The engine's client.

===================  ================================================================
`client.py`          asks, and asks again where that may help
`attempt.py`         one try at one engine
`places.py`          places at the engines, and the requests that wait for one
`choice.py`          which engine a request goes to
`lookout.py`         who is there, ejected or back; a task to each engine
`concurrency.py`     how many requests an engine is given, by what it says of itself: `signals.py`
`known_engine.py`    what is known of each engine: load, policy version, what is awaited
`probe.py`           what an engine is and can do, found out by asking it
`route.py`           a way to ask for tokens: `generate.py`, else `completions.py`
`sampling.py`        one turn asked for: how, by whom, and what a failure says of the episode
`answer.py`          what is believed of an answer
===================  ================================================================

Requests go over HTTP by `workers/engine_api/connection.py`, as the trainer's do.
"""

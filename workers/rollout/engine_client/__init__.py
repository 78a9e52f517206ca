"""Client of the engines: it chooses an engine for each request, and retries elsewhere if that fails.

========================  ===========================================================================
`client.py`               sample a turn, with retries
`engine_sampler.py`       one attempt at one engine
`router.py`               which engine a request goes to; `affinity.py` holds the pure function
`health.py`               which engines are healthy; `probe.py` finds out what an engine can do
`engine_state.py`         the state of one engine, shared by the four above
`adaptive_limit.py`       how many requests an engine gets, from its `engine_metrics.py`
`sampling_api.py`         one HTTP route to sample from: `generate_api.py`, `completions_api.py`
`sampling.py`             options of one turn
`sampled_turn.py`         one sampled turn, and the checks of an engine's answer
========================  ===========================================================================

Requests go over HTTP through `workers/engine_api/connection_pool.py`, as the trainer's do.
"""

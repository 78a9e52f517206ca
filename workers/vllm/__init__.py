"""A vLLM server of our own: found, started as it has to be, watched, and ended with all that it has started.

===================  ==================================================================
`interpreter.py`     which Python has vLLM, and what of it is there
`starting.py`        the command line and the environment
`last_error.py`      what of its output tells why it ended
`server.py`          the process: `penstock serve` where `engine.server = "vllm"`
===================  ==================================================================

Nothing here imports vLLM: it lives in an interpreter of its own, since it pins what we do not.
"""

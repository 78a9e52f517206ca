"""Starts a vLLM server, watches it, and stops it together with all its child processes.

===================  ==================================================================
`interpreter.py`     finds the Python interpreter with vLLM and checks it
`launch_command.py`  the command line and the environment
`output_tail.py`     finds the error in vLLM's output that explains its exit
`server.py`          runs the process: `penstock serve` with `engine.server = "vllm"`
===================  ==================================================================

Nothing here imports vLLM: vLLM pins versions that Penstock does not, so it has a separate virtual environment.
"""

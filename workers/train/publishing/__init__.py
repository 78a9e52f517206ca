"""How new weights get to the engines while they run.

===================  ================================================================
`weights.py`         a version: its number, its folder, given to engines, then known to everybody
`publisher.py`       which engine is given what, when, and how often it is tried
`way.py`             what a way of giving them is; `open_publisher` takes the one that the settings name
`in_flight.py`       whole weights, while requests under way are frozen: pause, send, resume
`files.py`           sent as a path on a file system that engines share
`over_http.py`       sent as files that engines download from the trainer
`nccl.py`            sent from GPU to GPU, by vLLM's own code
`adapters.py`        LoRA adapters, a new one to each version, beside those that requests under way go on with
`control.py`         one engine's control routes
===================  ================================================================
"""

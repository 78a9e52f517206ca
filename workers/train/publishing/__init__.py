"""Weights to the engines while they serve requests.

===================  ================================================================
`policy_versions.py` one policy version: its number, its folder, the push, the announcement
`publisher.py`       which engine gets which version, when, and how often a push is tried
`transport.py`       `WeightTransport`, and which one the settings name
`paused_update.py`   whole weights: pause, transfer, resume
`shared_folder.py`   transfer: engines read the folder on a shared file system
`http_transfer.py`   transfer: engines download the files from the trainer
`nccl_transfer.py`   transfer: GPU to GPU, by vLLM's own code
`adapter_update.py`  LoRA adapters, one per version, loaded beside those in use
`engine_control.py`  HTTP client of one engine's control routes
===================  ================================================================
"""

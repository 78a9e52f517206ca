"""Rewards measured by HTTP servers.

=====================  =================================================================================
`reward_model.py`      `reward_model`: a served reward model; batches the requests of many groups
`model_check.py`       check that a server serves a reward model and returns raw scores
`classify_api.py`      requests and responses of vLLM's `/classify`
`stats.py`             statistics of a served reward model, for the log
`judge.py`             `judge`: a language model rates completions
`service_client.py`    the HTTP client of both: deadlines, retries, several servers
=====================  =================================================================================
"""

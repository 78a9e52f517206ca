"""Serves a sequence classifier, for example a reward model, on `POST /classify`. Importing it does not import torch.

===========================  =============================================================
`server.py`                  the routes
`thread.py`                  the thread that owns the model and scores waiting requests
`classifier.py`              model and tokenizer; scores many conversations in one pass
`reference_classifier.py`    for comparison: one conversation by transformers' forward pass
`wire.py`                    requests and responses
===========================  =============================================================
"""

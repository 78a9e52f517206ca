"""Serves a sequence classifier, for example a reward model, by `POST /classify`. Importing it loads no torch.

=======================  =============================================================
`server.py`              the routes
`thread.py`              the thread that owns the model and scores waiting requests
`classifier.py`          model and tokenizer; scores many conversations in one pass
`plain_classifier.py`    for comparison: one conversation by transformers' forward pass
`wire.py`                requests and responses
=======================  =============================================================
"""

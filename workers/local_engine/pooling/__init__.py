"""A sequence classifier, a reward model for one, served by `POST /classify`. Importing the package loads no torch.

=======================  =============================================================
`server.py`              what is served; renders, and hands over to the thread
`thread.py`              the thread that owns the model and scores all that waits
`classifier.py`          model and tokenizer; many conversations in one pass
`plain_classifier.py`    the reference: one conversation, through transformers' own pass
`wire.py`                what goes over HTTP
=======================  =============================================================
"""

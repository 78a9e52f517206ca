"""Serves a sequence classifier, for example a reward model, on `POST /classify`. Importing it does not import torch."""

"""Scores one conversation at a time with transformers' forward pass, as the reference for served scores."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stream.errors import EngineError
from stream.records import Message
from workers.local_engine.pooling.classifier import load_classifier


class ReferenceClassifier:
    """A sequence classifier with one class, in float32."""

    def __init__(self, path: Path) -> None:
        """Load a model folder.

        Raises:
            SettingsError: the folder holds no classifier, or an incomplete one.
            EngineError: the classifier has more than one class, or no tokenizer.
        """
        model, self._tokenizer = load_classifier(path, "float32")
        if model.config.num_labels != 1:
            raise EngineError(f"{path}: a reward model has one class, this one has {model.config.num_labels}")
        self._model: Any = model.eval()

    @torch.inference_mode()
    def score(self, messages: Sequence[Message]) -> float:
        """Return the logit of a conversation."""
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        ids = self._tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return float(self._model(input_ids=ids).logits[0, 0])

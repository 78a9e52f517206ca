"""The reference for served scores: one conversation at a time through transformers' own forward pass."""

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
        """Read a model folder.

        Raises:
            EngineError: the folder holds no sequence classifier with one class.
        """
        model, self._tokenizer = load_classifier(path, "float32")
        if model.config.num_labels != 1:
            raise EngineError(f"{path}: a reward model has one class, this one has {model.config.num_labels}")
        self._model: Any = model.eval()

    @torch.inference_mode()
    def score(self, messages: Sequence[Message]) -> float:
        """The raw logit of a conversation."""
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        ids = self._tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return float(self._model(input_ids=ids).logits[0, 0])

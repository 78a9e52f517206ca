"""A Hugging Face sequence classifier that scores many conversations in one pass, each as if alone.

The score of a decoder is the head's output at the last token. Padding is on the right, where causal attention ignores
it. The last token is found by length, not by the padding token, which may also end a turn. `ReferenceClassifier` scores
one conversation at a time with transformers' own forward pass, to compare with.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.modeling_layers import GenericForSequenceClassification

from stream.errors import EngineError, EngineRefusedError
from stream.records import Message
from workers.local_engine.weights import load_model

log = structlog.get_logger()

MAX_TOKENS_PER_PASS = 8192
"""Largest number of tokens in one forward pass, padding included; a longer sequence has its own pass."""
_DEFAULT_MAX_LENGTH = 4096
"""Length limit for a model without `max_position_embeddings`, if none is given."""
ARCHITECTURE_SUFFIX = "ForSequenceClassification"
"""Suffix of the architecture names of sequence classifiers."""


class Classifier:
    """A model with its tokenizer. `score` is for one thread, `render` and `encode` for one other thread.

    Args:
        model: transformers' sequence classifier, on the CPU.
        tokenizer: tokenizer of the model; rendering conversations needs a chat template.
        max_length: largest number of tokens in a sequence, at most the model's positions; 0: all positions.

    Raises:
        EngineError: the last token of a padded sequence cannot be found.
    """

    def __init__(self, model: Any, tokenizer: Any, max_length: int) -> None:
        positions: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
        if positions < max_length:
            log.warning("engine.max_length_reduced", asked=max_length, length=positions)
        self.max_length = min(max_length or positions, positions) or _DEFAULT_MAX_LENGTH
        self.num_classes: int = model.config.num_labels
        self.labels: dict[int, str] = dict(model.config.id2label)
        self._problem = model.config.problem_type
        self._model = model.eval().requires_grad_(requires_grad=False)
        self._tokenizer = tokenizer
        self._is_decoder = isinstance(model, GenericForSequenceClassification)
        if not self._is_decoder and getattr(model.config, "pad_token_id", None) is None:
            raise EngineError(f"{type(model).__name__} is neither a decoder nor has a padding token")
        self._pad: int = getattr(model.config.get_text_config(), "pad_token_id", None) or 0

    @classmethod
    def load(cls, path: Path, *, max_length: int, dtype: str) -> "Classifier":
        """Load a model folder.

        Raises:
            SettingsError: the folder holds no sequence classifier, or an incomplete one.
            EngineError: there is no tokenizer, or the model is not supported.
        """
        model, tokenizer = load_classifier(path, dtype)
        return cls(model, tokenizer, max_length)

    def render(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """Return a conversation as tokens, rendered with the chat template.

        Raises:
            EngineRefusedError: there is no template, it refuses the messages, or the conversation is too long.
        """
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # a template is third-party code and may raise anything
            raise EngineRefusedError(
                f"the chat template cannot render the messages: {type(error).__name__}: {error}"
            ) from error
        return self.encode(text, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text as tokens.

        Raises:
            EngineRefusedError: the text is empty or too long.
        """
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return self.check_tokens(ids)

    def check_tokens(self, ids: list[int]) -> list[int]:
        """Return the tokens unchanged if the model accepts them.

        Raises:
            EngineRefusedError: the list is empty, too long, or has tokens outside the vocabulary.
        """
        if not ids:
            raise EngineRefusedError("there is nothing to classify: no tokens")
        if len(ids) > self.max_length:
            raise EngineRefusedError(
                f"the input has {len(ids)} tokens and the maximum context length is {self.max_length}"
            )
        vocabulary = self._model.config.get_text_config().vocab_size
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise EngineRefusedError(f"the input holds an id outside the model's vocabulary of {vocabulary}")
        return ids

    @torch.inference_mode()
    def score(self, sequences: Sequence[list[int]]) -> Tensor:
        """Return the head's raw output for each sequence.

        Args:
            sequences: tokens of each sequence, at least one.

        Returns:
            float32 logits [len(sequences), classes].
        """
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        logits_NC = torch.empty(len(sequences), self.num_classes)
        while order:
            # Score the longest remaining sequence, and as many others as fit into the pass.
            rows = max(1, MAX_TOKENS_PER_PASS // len(sequences[order[-1]]))
            chosen, order = order[-rows:], order[:-rows]
            logits_NC[chosen] = self._forward([sequences[i] for i in chosen])
        return logits_NC

    def apply_activation(self, logits: Tensor) -> Tensor:
        """Apply vLLM's default activation: probabilities for classes; regression logits stay unchanged."""
        if self._problem == "regression":
            return logits
        if self._problem == "multi_label_classification" or self.num_classes == 1:
            return logits.sigmoid()
        return logits.softmax(-1)

    def _forward(self, sequences: Sequence[list[int]]) -> Tensor:
        lengths = torch.tensor([len(ids) for ids in sequences])
        width = int(lengths.max())
        ids_BT = torch.tensor([ids + [self._pad] * (width - len(ids)) for ids in sequences])
        mask_BT = (torch.arange(width) < lengths[:, None]).long()
        if not self._is_decoder:
            logits: Tensor = self._model(input_ids=ids_BT, attention_mask=mask_BT).logits
            return logits.float()
        body = getattr(self._model, self._model.base_model_prefix)
        hidden_BTC = body(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
        last_BC = hidden_BTC[torch.arange(len(sequences)), lengths - 1]
        weight, bias = self._model.score.weight, getattr(self._model.score, "bias", None)
        return torch.nn.functional.linear(last_BC.float(), weight.float(), None if bias is None else bias.float())


def load_classifier(path: Path, dtype: str) -> tuple[Any, Any]:
    """Load a sequence classifier and its tokenizer.

    Raises:
        SettingsError: the folder holds no classifier, or weights are missing, for example the head's.
        EngineError: there is no tokenizer.
    """
    model = load_model(path, "sequence classifier", getattr(torch, dtype), attn_implementation="sdpa")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise EngineError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    return model, tokenizer


def is_classifier(path: Path) -> bool:
    """Return whether the configuration in a model folder names a sequence classifier."""
    try:
        config: Any = msgspec.json.decode((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return False  # loading the model reports the error
    architectures = config.get("architectures") if isinstance(config, dict) else None
    return any(str(name).endswith(ARCHITECTURE_SUFFIX) for name in architectures or ())


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

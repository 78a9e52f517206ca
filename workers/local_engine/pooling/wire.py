"""Request and response of vLLM's `/classify`. Does not import torch."""

import time
import uuid
from typing import Any

import msgspec
from msgspec import Struct, field

from stream.errors import EngineRefusedError


class ClassifyRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /classify`: a conversation in `messages`, or texts or token ids in `input`."""

    messages: list[dict[str, Any]] | None = None
    input: str | list[str | int | list[int]] | None = None
    use_activation: bool | None = None
    """None means True, as in vLLM."""
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    user: str | None = None
    request_id: str = ""

    def inputs(self) -> list[str | list[int]]:
        """Return `input` as one text, or one list of token ids, per sequence.

        Raises:
            EngineRefusedError: texts and token ids are mixed.
        """
        given = [self.input] if isinstance(self.input, str) else self.input or []
        if given and all(isinstance(entry, int) for entry in given):
            return [list(given)]  # type: ignore[arg-type]
        if any(isinstance(entry, int) for entry in given):
            raise EngineRefusedError("input: token ids, or a list of texts or of lists of token ids")
        return given  # type: ignore[return-value]


class Classification(Struct):
    """One entry of `data` in a response."""

    index: int
    label: str | None
    probs: list[float]
    """One probability per class; logits if the request turns the activation off."""
    num_classes: int


class Usage(Struct):
    """Number of tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class ClassifyResponse(Struct, kw_only=True):
    """Response of `POST /classify`."""

    id: str = field(default_factory=lambda: f"classify-{uuid.uuid4().hex}")
    object: str = "list"
    created: int = field(default_factory=lambda: int(time.time()))
    model: str
    data: list[Classification]
    usage: Usage


_decoder = msgspec.json.Decoder(ClassifyRequest)


def decode_classify_request(body: bytes) -> ClassifyRequest:
    """Decode and check the body of `POST /classify`.

    Raises:
        EngineRefusedError: the request is malformed.
    """
    try:
        request = _decoder.decode(body)
    except ValueError as error:
        raise EngineRefusedError(f"bad request: {error}") from error
    if (request.messages is None) == (request.input is None):
        raise EngineRefusedError("bad request: exactly one of messages and input is required")
    return request

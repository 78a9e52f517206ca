"""The body of a chat completion request: which parameters are known, and how they become sampling parameters."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from stream.errors import EngineRefusedError
from stream.records import Message
from workers.engine_api.wire import GenerateRequest, SamplingParams
from workers.rollout.agent_endpoint.dialects.openai_chat import parse_messages

_Count = Annotated[int, Meta(ge=1)]


class StreamOptions(Struct, frozen=True):
    """Options of an answer in server-sent events."""

    include_usage: bool | None = None
    """Send the numbers of tokens before the end."""


class ResponseFormat(Struct, frozen=True):
    """Form of the answer; only text can be had, since nothing constrains what the model samples."""

    type: Literal["text"] = "text"


class ChatRequest(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A chat completion request; null means the default. Parameters that would change the answer are never ignored."""

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    """`none`: the model sees the tools, but what it writes is text."""
    parallel_tool_calls: bool | None = None
    """False: only the first call of a turn is returned."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    """The newer name of `max_tokens`; default: what the context length leaves."""
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    """With several choices, choice i is sampled with `seed` + i."""
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    frequency_penalty: Annotated[float, Meta(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=0, le=0)] | None = None
    response_format: ResponseFormat | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def conversation(self) -> list[Message]:
        """Return the messages as a chat template takes them.

        Raises:
            EngineRefusedError: they are malformed.
        """
        return parse_messages(self.messages)

    def generate_requests(self, prompt: Sequence[int], stop_token_ids: Sequence[int]) -> list[GenerateRequest]:
        """Return a request to the engine for each choice."""
        limit = self.max_completion_tokens or self.max_tokens or 2**31 - 1  # the engine ends at its context length
        default = SamplingParams()
        params = SamplingParams(
            max_tokens=limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            stop=self.stops,
            stop_token_ids=list(stop_token_ids),
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_p=default.top_p if self.top_p is None else self.top_p,
            top_k=default.top_k if self.top_k is None else self.top_k,
            min_p=default.min_p if self.min_p is None else self.min_p,
            logit_bias=self.logit_bias or {},
        )
        seeds = [None if self.seed is None else self.seed + index for index in range(self.n or 1)]
        return [GenerateRequest(token_ids=list(prompt), sampling_params=replace(params, seed=seed)) for seed in seeds]


class _Tool(Struct):
    class _Function(Struct):
        name: str
        parameters: dict[str, Any] | None = None

    type: Literal["function"]
    function: _Function


_decoder = msgspec.json.Decoder(ChatRequest)


def decode_chat_request(body: bytes) -> ChatRequest:
    """Decode and check a request.

    Raises:
        EngineRefusedError: it is not JSON, or a parameter is unknown, wrong, or not supported.
    """
    try:
        request = _decoder.decode(body)
        msgspec.convert(request.tools or [], list[_Tool])
    except msgspec.ValidationError as error:
        raise EngineRefusedError(f"bad request: {_explain(str(error))}") from error
    except (ValueError, RecursionError) as error:
        raise EngineRefusedError(f"the request is not readable JSON: {error}") from error
    if request.top_logprobs is not None and not request.logprobs:
        raise EngineRefusedError("top_logprobs is set, but logprobs is not; set logprobs to true")
    return request


def _explain(error: str) -> str:
    """Return the decoder's message, with the remedy for parameters that the engine does not support."""
    for name, remedy in (
        ("tool_choice", "this engine cannot force a call; use 'auto' or 'none'"),
        ("response_format", "this engine cannot constrain the answer; ask for JSON in the prompt"),
        ("_penalty", "this engine has no penalties; leave it out"),
    ):
        if f"$.{name}" in error or (name.startswith("_") and name in error):
            return f"{error}: {remedy}"
    if error.startswith("Object contains unknown field"):
        return f"{error}; known are {', '.join(ChatRequest.__struct_fields__)}"
    return error

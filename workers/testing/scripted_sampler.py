"""A scripted model with one token per byte, and the chat template for it."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import anyio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stream.records import Span
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.template import ChatTemplate
from workers.rollout.engine_client.sampled_turn import SampledTurn
from workers.rollout.engine_client.sampling import SamplingOptions

_START, _END = "<|start|>", "<|end|>"
_TEMPLATE = """\
{%- for message in messages %}
{{- '<|start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content or [] %}{{- part | tojson }}{%- endfor %}{%- endif %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"""


class ScriptedSampler:
    """Samples scripted turns; later turns are empty, which ends an episode.

    Args:
        turns: texts of the model's turns.
    """

    def __init__(self, turns: Sequence[str]) -> None:
        self.turns_sampled = 0
        """Number of turns so far, including turns after the end of the script."""
        self._turns = turns

    async def sample(
        self,
        prompt_ids: Sequence[int],  # noqa: ARG002
        sampling: SamplingOptions,
        *,
        min_policy_version: int = 0,  # noqa: ARG002
    ) -> SampledTurn:
        """See `Sampler.sample`."""
        await anyio.lowlevel.checkpoint()
        text = self._turns[self.turns_sampled] if self.turns_sampled < len(self._turns) else ""
        self.turns_sampled += 1
        ids = _tokenizer().encode(text + _END, add_special_tokens=False).ids
        is_cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        return SampledTurn(ids, [-1.0] * len(ids), "length" if is_cut else "stop", [Span(0, 0, len(ids))])


@lru_cache(maxsize=1)
def scripted_chat() -> ChatTokenizer:
    """Return a tokenizer that renders any conversation, without tools."""
    return ChatTokenizer(_tokenizer(), ChatTemplate(_TEMPLATE, {}, Path("workers/testing")), None, set())


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (_START, _END)])
    return tokenizer

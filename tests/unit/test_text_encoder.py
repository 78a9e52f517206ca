"""Texts are encoded in parts exactly as the whole tokenizer does it, and each part once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.cases.families import FAMILIES, chat_of, tokenizer_of
from workers.rollout.chat.text_encoder import TextEncoder

TOKENIZERS = {name: tokenizer_of(name) for name in FAMILIES}
SPECIAL = {name: sorted(t.content for t in tok.get_added_tokens_decoder().values()) for name, tok in TOKENIZERS.items()}
WORDS = st.text(max_size=8) | st.sampled_from(
    ["add", "Hmm", " It", "\n\n", "user\n", "<", "<|", "|>", "<|im_end", "é中🙂"]
)


def whole(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def encoder_of(tokenizer, text):
    encoder = TextEncoder(tokenizer)
    encoder.find_cuts(text)
    return encoder


@pytest.fixture(scope="module")
def encoders():
    return {name: encoder_of(tokenizer, "".join(SPECIAL[name])) for name, tokenizer in TOKENIZERS.items()}


@given(data=st.data(), family=st.sampled_from(sorted(FAMILIES)))
def test_a_text_in_parts_has_the_tokens_of_the_whole(encoders, data, family):
    tokenizer, special = TOKENIZERS[family], SPECIAL[family]
    pieces = st.lists(WORDS | st.sampled_from(special), max_size=8).map("".join)
    encoder = encoders[family]
    assert encoder._cuts is not None
    text = data.draw(pieces)
    assert encoder.encode_segments(text) == whole(tokenizer, text)
    assert encoder.encode_segments(text) == whole(tokenizer, text), "again, from what is remembered"


class RecordingTokenizer:
    """Notes what is encoded."""

    def __init__(self, tokenizer):
        self.tokenizer, self.texts = tokenizer, []

    def encode(self, text, **options):
        self.texts.append(text)
        return self.tokenizer.encode(text, **options)


def test_what_a_result_says_is_tokenized_once():
    chat = chat_of("qwen2.5", [{"type": "function", "function": {"name": "add"}}])
    chat._encoder._tokenizer = tokenizer = RecordingTokenizer(chat._tokenizer)
    chat.continuation_ids([{"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "?"}], True)
    tokenizer.texts.clear()
    result = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "a result"}
    expected = whole(chat._tokenizer, chat.renderer.render_continuation([result]))[1:]
    for _ in range(2):
        ids = chat.continuation_ids([result], ended_with_eos=True)
        assert ids == expected
        ids.append(7)  # the caller's own
    assert tokenizer.texts == ["user\n<tool_response>\na result\n</tool_response>"]


def test_what_is_remembered_is_bounded():
    tokenizer = RecordingTokenizer(tokenizer_of("qwen2.5"))
    encoder = TextEncoder(tokenizer)
    for number in range(40):
        encoder.encode_segments(f"{number} " + "word " * 3_000)
    encoder.encode_segments("39 " + "word " * 3_000)
    encoder.encode_segments("0 " + "word " * 3_000)
    assert [text[:3] for text in tokenizer.texts[40:]] == ["0 w"]


def sentencepiece_like():
    tokenizer = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "b": 2}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def byte_level(**options):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "token", "more"),
    [
        (sentencepiece_like(), AddedToken("<x>", special=True, normalized=False), ()),
        (byte_level(add_prefix_space=True), AddedToken("<x>", special=True, normalized=False), ()),
        (byte_level(add_prefix_space=False), AddedToken("<x>", special=True, normalized=True), ()),
        (byte_level(add_prefix_space=False), AddedToken("<x>", special=True, normalized=False, lstrip=True), ()),
        (byte_level(add_prefix_space=False), AddedToken("<x>", special=True, normalized=False, rstrip=True), ()),
        (
            byte_level(add_prefix_space=False),
            AddedToken("<x>", special=True, normalized=False),
            [AddedToken("a<", normalized=False)],
        ),
        (
            byte_level(add_prefix_space=False),
            AddedToken("<x>", special=True, normalized=False),
            [AddedToken("a", single_word=True, normalized=False)],
        ),
    ],
    ids=["metaspace", "prefix-space", "normalized", "lstrip", "rstrip", "overlap", "single-word"],
)
def test_a_tokenizer_whose_parts_depend_on_each_other_encodes_whole_texts(tokenizer, token, more):
    tokenizer.add_special_tokens([token])
    tokenizer.add_tokens(list(more))
    encoder = encoder_of(tokenizer, "<x>")
    assert encoder._cuts is None
    text = "a b<x> a<x>a <x>b"
    assert encoder.encode_segments(text) == whole(tokenizer, text)


def test_a_tokenizer_with_a_normalizer_of_each_part_is_cut():
    tokenizer = byte_level(add_prefix_space=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken("<x>", special=True, normalized=False)])
    encoder = encoder_of(tokenizer, "<x>")
    text = "e\u0301<x>\u0301e<x>"
    assert encoder._cuts is not None
    assert encoder.encode_segments(text) == whole(tokenizer, text)

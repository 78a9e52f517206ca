import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer

from stream.errors import DataError, PenstockError
from tests.cases.chats import ADD, CALL, TEMPLATE, USER, make_tokenizer, model_folder, tool, write
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.template import ChatTemplate
from workers.rollout.chat.text_encoder import TextEncoder


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path)


def text_of(folder, ids):
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids, skip_special_tokens=False)


def ids_of(folder, text):
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def test_a_prompt_ends_where_the_assistant_begins(folder):
    ids = ChatTokenizer.load(folder, {}, None).prompt_ids([USER])
    assert text_of(folder, ids) == "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert ids == ids_of(folder, text_of(folder, ids))


def test_tools_are_in_the_prompt_and_not_in_continuations(folder):
    with_tools, without = ChatTokenizer.load(folder, {}, [ADD]), ChatTokenizer.load(folder, {}, None)
    assert '"name": "add"' in text_of(folder, with_tools.prompt_ids([USER]))
    assert with_tools.continuation_ids([tool("3")], True) == without.continuation_ids([tool("3")], True)


def test_prompt_turns_and_continuations_equal_the_rendered_conversation(folder):
    chat = ChatTokenizer.load(folder, {}, [ADD])
    two = [tool("3"), tool("Error: no <|such|> thing")]
    turns = [(CALL, [tool("3")]), (f"{CALL} and {CALL}", two), ("Wait.", [tool("")])]
    messages = [{"role": "system", "content": "Be brief."}, USER]
    ids = chat.prompt_ids(messages)
    for text, results in turns:
        messages += [{"role": "assistant", "content": text}, *results]
        ids = ids + ids_of(folder, text) + [chat.end_of_turn_id] + chat.continuation_ids(results, True)
        assert ids == chat.prompt_ids(messages)


def test_text_after_the_end_of_turn_belongs_to_the_continuation(folder):
    chat = ChatTokenizer.load(folder, {}, None)
    expected = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert text_of(folder, chat.continuation_ids([tool("3")], True)) == expected


def test_the_continuation_adds_an_end_of_turn_that_was_not_sampled(folder):
    chat = ChatTokenizer.load(folder, {}, None)
    assert chat.continuation_ids([tool("3")], False) == [chat.end_of_turn_id, *chat.continuation_ids([tool("3")], True)]


def test_an_end_of_turn_token_that_includes_the_line_break_is_cut_once(folder):
    make_tokenizer(rstrip=True).save(str(folder / "tokenizer.json"))
    chat = ChatTokenizer.load(folder, {}, None)
    ids = chat.continuation_ids([tool("3")], True)
    assert text_of(folder, ids).startswith("<|im_start|>user\n<tool_response>")
    assert chat.prompt_ids([USER])[-len(ids_of(folder, "assistant\n")) :] == ids[-len(ids_of(folder, "assistant\n")) :]


def test_a_tool_result_that_quotes_the_dummy_conversation_is_unchanged(folder):
    from workers.rollout.chat.renderer import _MARK

    chat = ChatTokenizer.load(folder, {}, None)
    assert f"\n{_MARK}<|im_end|>\n" in text_of(folder, chat.continuation_ids([tool(f"{_MARK}<|im_end|>")], True))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": 7}}, {7}),
        ({"generation_config.json": {"eos_token_id": [7, 8]}}, {7, 8}),
        ({"config.json": {"eos_token_id": 9}}, {9}),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|endoftext|>"}}}, {256}),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "<|endoftext|>"}}, {256}),
        ({"tokenizer_config.json": {}}, set()),
    ],
)
def test_stop_tokens_come_from_the_folder_and_the_template(folder, files, expected):
    (folder / "tokenizer_config.json").write_text("{}")
    for name, content in files.items():
        write(folder, name, **content)
    chat = ChatTokenizer.load(folder, {}, None)
    assert chat.end_of_turn_id == 258
    assert chat.stop_token_ids == tuple(sorted({258} | expected))


def test_a_turns_text_keeps_special_tokens_except_the_final_one(folder):
    chat = ChatTokenizer.load(folder, {}, None)
    ids = ids_of(folder, "Hi<|im_start|>é<|im_end|><|im_end|>")
    assert chat.decode(ids) == "Hi<|im_start|>é<|im_end|>"
    assert chat.decode(ids_of(folder, "Hi")) == "Hi"
    assert chat.decode([]) == ""


def test_special_tokens_and_template_arguments_reach_the_template(folder):
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ pad_token }}{{ mood }}{{ messages[0].content }}")
    write(folder, "tokenizer_config.json", bos_token="<|im_start|>", pad_token={"content": "<|endoftext|>"})
    chat = ChatTokenizer.load(folder, {"mood": "glad:"}, None)
    assert text_of(folder, chat.prompt_ids([USER])) == "<|im_start|><|endoftext|>glad:What is 1 + 2?"


def test_a_template_of_the_tokenizer_config_is_found_and_one_for_tools_preferred(folder):
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    write(folder, "tokenizer_config.json", chat_template=named)
    assert text_of(folder, ChatTokenizer.load(folder, {}, None).prompt_ids([USER])) == "plain"
    assert text_of(folder, ChatTokenizer.load(folder, {}, [ADD]).prompt_ids([USER])) == "with tools"
    write(folder, "tokenizer_config.json", chat_template="one for all")
    assert text_of(folder, ChatTokenizer.load(folder, {}, [ADD]).prompt_ids([USER])) == "one for all"


def test_truncation_and_padding_of_a_saved_tokenizer_are_ignored(folder):
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=512)
    tokenizer.save(str(folder / "tokenizer.json"))
    chat = ChatTokenizer.load(folder, {}, None)
    text = f"<|im_start|>user\n{'long ' * 9}<|im_end|>\n<|im_start|>assistant\n"
    assert chat.decode(chat.prompt_ids([{"role": "user", "content": "long " * 9}])) == text


def test_a_template_without_an_end_of_turn_allows_single_turns_only(folder):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    chat = ChatTokenizer.load(folder, {}, None)
    assert text_of(folder, chat.prompt_ids([USER])) == "user: What is 1 + 2?\n"
    assert chat.end_of_turn_id is None
    with pytest.raises(PenstockError, match="without a special token"):
        chat.continuation_ids([tool("3")], True)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), r"no tokenizer\.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "not a tokenizer"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template"),
        (
            lambda folder: (folder / "generation_config.json").write_text("{"),
            r"generation_config\.json: cannot be read",
        ),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds a JSON list"),
    ],
)
def test_a_folder_without_a_model_is_refused_with_the_reason(folder, break_it, message):
    break_it(folder)
    with pytest.raises(PenstockError, match=message):
        ChatTokenizer.load(folder, {}, None)


def test_a_missing_folder_is_reported_by_name(tmp_path):
    with pytest.raises(PenstockError, match="nowhere: no such folder"):
        ChatTokenizer.load(tmp_path / "nowhere", {}, None)


def test_messages_that_the_template_refuses_are_a_data_error(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        ChatTokenizer.load(folder, {}, None).prompt_ids([USER, USER])


def test_cached_prompts_are_neither_confused_nor_shared(folder):
    chat = ChatTokenizer.load(folder, {}, None)
    first = chat.prompt_ids([USER])
    other = chat.prompt_ids([{"role": "user", "content": "Else?"}])
    first.append(0)
    assert "Else?" in chat.decode(other)
    assert chat.prompt_ids([USER]) == first[:-1]


async def test_completions_of_a_group_do_not_share_the_context_that_grows_from_their_prompt(folder):
    import anyio

    chat = await anyio.to_thread.run_sync(ChatTokenizer.load, folder, {}, None)
    contexts = [await chat.encode_prompt([USER]) for _ in range(2)]
    contexts[0].extend([0])
    assert contexts[1].tolist() == chat.prompt_ids([USER])


class WatchedTemplate(ChatTemplate):
    """Records the rendering thread."""

    def render(self, *args, **kwargs):
        self.__dict__.setdefault("threads", []).append(threading.get_ident())
        return super().render(*args, **kwargs)


async def test_long_prompts_are_rendered_and_tokenized_in_a_thread_once_per_group(folder, monkeypatch):
    import anyio

    template, tokenized = WatchedTemplate(TEMPLATE, {}, folder), []
    encode = TextEncoder.encode
    monkeypatch.setattr(TextEncoder, "encode", lambda encoder, text: tokenized.append(text) or encode(encoder, text))
    chat = await anyio.to_thread.run_sync(
        ChatTokenizer, make_tokenizer(), template, None, set()
    )  # as a worker makes it
    template.threads.clear()
    await chat.encode_prompt([USER])
    await chat.encode_continuation([tool("3")], True)
    assert set(template.threads) == {threading.get_ident()}

    template.threads.clear()
    tokenized.clear()
    long = [{"role": "user", "content": "x" * 25_000}]
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(chat.encode_prompt, long)
    assert tokenized == ["user\n" + "x" * 25_000]
    await chat.encode_continuation([tool("x" * 25_000)], True)
    assert len(template.threads) == 2
    assert threading.get_ident() not in template.threads


async def test_long_turns_are_decoded_in_a_thread(folder, monkeypatch):
    import anyio

    chat, threads = await anyio.to_thread.run_sync(ChatTokenizer.load, folder, {}, None), []
    monkeypatch.setattr(chat, "decode", lambda ids: threads.append(threading.get_ident()) or str(len(ids)))
    assert [await chat.decode_turn([1] * n) for n in (9_999, 10_000)] == ["9999", "10000"]
    assert threads[0] == threading.get_ident() != threads[1]


def test_threads_may_share_a_chat(folder):
    chat = ChatTokenizer.load(folder, {}, [ADD])

    def both(i):
        text = str(i % 5) * 50
        return chat.prompt_ids([{"role": "user", "content": text}]), chat.continuation_ids([tool(text)], True)

    with ThreadPoolExecutor(8) as threads:
        result = list(threads.map(both, range(200)))
    assert result == [both(i) for i in range(200)]


@pytest.mark.parametrize(
    ("end", "opening"),
    [
        ("<|im_start|>assistant\n", ""),
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>" + 12 * "\n", "<think>" + 12 * "\n"),
        ("<think> and more", ""),
        ("a list [1]", ""),
        ("", ""),
    ],
)
def test_a_context_that_ends_with_a_reasoning_tag_opens_the_reasoning(tmp_path, end, opening):
    chat = ChatTokenizer.load(model_folder(tmp_path), {}, [])
    assert chat.open_reasoning(chat._tokenizer.encode(end, add_special_tokens=False).ids) == opening

"""Episodes with tools and reasoning under the real chat templates of model families, against a scripted engine."""

import functools
import json
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.factory import EnvironmentFactory
from envs.references import Reference
from envs.rewards.parts import merge_parts
from envs.snapshot import thaw
from stream.codec import decode, encode
from stream.errors import SettingsError
from stream.records import Group, Prompt, Span
from stream.validity import TruncationReason
from tests.cases.families import FAMILIES, chat_of, spelled, template_of, tokenizer_of
from tests.scripted_engine.answers import scripted_logprob
from tests.scripted_engine.engine import ScriptedEngine
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.chat.format_detection import choose_tool_format
from workers.rollout.chat.history_check import check_history
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.sampling import SampledTurn
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import RolloutSettings
from workers.train.step.batch import collate


class Sums:
    """Adds."""

    def reset(self, **row):
        self.sums = []

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one.
            b: the other.
        """
        self.sums.append(a + b)
        return a + b

    def get_reward(self):
        return float(sum(self.sums))


def factory(cls=Sums):
    return EnvironmentFactory(Reference("test", "module", cls, sys.modules[__name__]), cls, cls())


TOOLS = [tool.schema for tool in factory().tools]


def json_calls(key):
    def write(*numbers):
        return [json.dumps({"name": "add", key: {"a": a, "b": b}}) for a, b in numbers]

    return write


def hermes(*numbers):
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in json_calls("arguments")(*numbers))


def llama(*numbers):
    return "; ".join(json_calls("parameters")(*numbers))


def nemo(*numbers):
    calls = [
        call[:-1] + f', "id": "abcdefg{a:02}"}}'
        for (a, _), call in zip(numbers, json_calls("arguments")(*numbers), strict=True)
    ]
    return f"[TOOL_CALLS][{', '.join(calls)}]"


def ministral(*numbers):
    return "".join(f'[TOOL_CALLS]add[ARGS]{{"a": {a}, "b": {b}}}' for a, b in numbers)


def pythonic(*numbers):
    return f"<|tool_call_start|>[{', '.join(f'add(a={a}, b={b})' for a, b in numbers)}]<|tool_call_end|>"


def deepseek(*numbers):
    def token(words):
        return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"

    calls = [
        token("tool call begin") + "function" + token("tool sep") + f'add\n```json\n{{"a": {a}, "b": {b}}}\n```'
        for a, b in numbers
    ]
    return token("tool calls begin") + "\n".join(c + token("tool call end") for c in calls) + token("tool calls end")


WRITERS = {
    "deepseek-r1": deepseek,
    "llama3.1": llama,
    "mistral-nemo": nemo,
    "ministral-3": ministral,
    "lfm2.5": pythonic,
}
THOUGHTS = {
    "qwen3": "<think>\n{}\n</think>\n\n",
    "qwq": "{}\n</think>\n\n",
    "deepseek-r1": "{}\n</think>\n\n",
    "ministral-3": "[THINK]{}[/THINK]",
}
BEGUN = {"qwq": "<think>\n", "deepseek-r1": "<think>\n"}
NO_TOOLS = SimpleNamespace(format=TOOL_FORMATS["hermes"])
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is 1 + 2?"}


def prepared(name, **args):
    """Set up a chat as `load_chat_setups` does."""
    chat = chat_of(name, TOOLS, **args)
    choice = choose_tool_format("auto", chat.renderer.template, TOOLS)
    chat.check_history()
    return chat, choice


async def played(chat, choice, tokenizer, texts, messages=(ASK,), environment=Sums, **limits):
    """Run one completion; return it, the contexts that the engine received, and its answers."""
    sampled = [spelled(tokenizer, text) for text in texts]

    def reply(_ids, _request):
        return sampled[len(engine.requests) - 1]

    prompt = Prompt(id="train:0:0", messages=list(messages), environment="sums", group_size=1)
    async with (
        ScriptedEngine(reply, version="3", max_length=1_000_000) as engine,
        EngineClient([engine.url], request_timeout_s=5, max_attempts=1, unavailable_timeout_s=5) as client,
        EnvironmentPool({"sums": factory(environment)}, size=1) as pool,
    ):
        group = await GroupRunner(
            chats={prompt.environment: ChatSetup(chat, choice.format)},
            sampler=client,
            pool=pool,
            limits=RolloutSettings(**{"max_tokens": 20_000, "max_tokens_per_turn": 2_000} | limits),
        ).run(prompt)
    group = decode(encode(group), Group)
    collate([group])  # it can be trained
    return group.completions[0], [list(request.token_ids) for request in engine.requests], sampled


def assert_exact(completion, asked, sampled):
    """Check that each turn is in exactly one row, after exactly the engine's context, with its log-probs."""
    turns = [(row, start, end) for row in completion.rows for start, end in row.sampled_ranges]
    assert len(turns) == len(asked) == completion.turns
    logprobs = [value for row in completion.rows for value in row.sampled_logprobs]
    expected = []
    for (row, start, end), prompt, answer in zip(turns, asked, sampled, strict=True):
        tokens = row.tokens.tolist()
        assert row.prompt.tolist() + tokens[:start] == prompt
        assert tokens[start:end] == answer
        expected += [scripted_logprob(len(prompt) + i, token) for i, token in enumerate(answer)]
    assert logprobs == pytest.approx(expected, abs=1e-6)


def told(name, completion, texts, structured):
    """Yield the messages before each turn, as a program without tokens passes them to the template."""
    messages = list(completion.prompt_messages)
    texts = iter(texts)
    for number, message in enumerate(completion.messages):
        if message["role"] != "assistant":
            messages.append(message)
            continue
        yield list(messages)
        begun = BEGUN.get(name, "") if not number or name == "qwq" else ""
        messages.append(message if structured else {"role": "assistant", "content": begun + next(texts)})


class Customer:
    """Answers each turn as a user, and hangs up after the third."""

    def reset(self, **row):
        self.heard = []

    def respond(self, message):
        self.heard.append(message)
        return None if len(self.heard) == 3 else f"Reply {len(self.heard)}."


USER_ROWS = (
    dict.fromkeys(FAMILIES.keys() - {"hermes-3"}, (False, 1))  # that template needs tools
    | dict.fromkeys(THOUGHTS, (True, 3))
    | {"ministral-3": (False, 1), "mistral-nemo": (True, 1), "lfm2.5": (True, 1)}
)
"""Whether a template rewrites history when users answer, and the number of rows that three turns make. Most templates
drop a turn's reasoning once a user message follows it; Mistral's moves the system message."""


@pytest.mark.parametrize("name", sorted(USER_ROWS))
async def test_turns_that_the_environment_answers_are_rendered_as_user_messages(name):
    chat = chat_of(name, None)
    chat.check_history(with_tools=False, with_user_replies=True)
    forks, rows = USER_ROWS[name]
    assert chat.rewrites_history is forks
    tokenizer, eos = tokenizer_of(name), FAMILIES[name].eos if name != "gemma-2" else "<end_of_turn>"
    thought = THOUGHTS.get(name, "").format("Hm.")
    texts = [f"{thought}It is 3.", f"{thought}It is 4.", f"{thought}Bye."]
    completion, asked, sampled = await played(
        chat, NO_TOOLS, tokenizer, [text + eos for text in texts], environment=Customer
    )

    assert_exact(completion, asked, sampled)
    assert len(completion.rows) == rows
    assert (completion.tool_calls, completion.truncated, completion.failure) == (0, None, None)
    assert [m["content"] for m in completion.messages if m["role"] == "user"] == ["Reply 1.", "Reply 2."]
    assert thaw(completion.snapshot, factory(Customer)).heard == ["It is 3.", "It is 4.", "Bye."]
    for ids, messages in zip(asked, told(name, completion, texts, False), strict=True):
        rendered = template_of(name).render(messages, None, add_generation_prompt=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


ROWS = {
    "qwen2.5": (False, 1),
    "qwen3": (False, 1),
    "qwq": (True, 3),
    "llama3.1": (False, 1),
    "mistral-nemo": (True, 2),
    "ministral-3": (False, 1),
    "hermes-3": (False, 1),
    "deepseek-r1": (True, 2),  # opens no reasoning after a tool result, so none is dropped
    "granite-4": (False, 1),
    "lfm2.5": (False, 1),
}
"""Whether a template rewrites history, and the number of rows that three turns make."""


@pytest.mark.parametrize("name", ROWS)
async def test_each_turns_context_is_what_the_engine_got_and_what_the_template_renders(name):
    chat, choice = prepared(name)
    forks, rows = ROWS[name]
    assert chat.rewrites_history is forks
    tokenizer, write, eos = tokenizer_of(name), WRITERS.get(name, hermes), FAMILIES[name].eos
    thought = THOUGHTS.get(name, "").format(f"Hm. Or {write((9, 9))}?".replace("</", "< /"))
    texts = [thought + write((1, 2)), thought + write((3, 4), (5, 6)), "It is addition."]
    if name == "deepseek-r1":
        texts[1] = write((3, 4), (5, 6))  # its template opens no reasoning after a tool result
    completion, asked, sampled = await played(chat, choice, tokenizer, [t + eos for t in texts], [SYSTEM, ASK])

    assert_exact(completion, asked, sampled)
    assert len(completion.rows) == rows
    assert (completion.tool_calls, completion.tool_errors, completion.truncated) == (3, 0, None)
    assert [m["content"] for m in completion.messages if m["role"] == "tool"] == ["3", "7", "11"]
    for ids, messages in zip(asked, told(name, completion, texts, chat.renderer.needs_tool_calls), strict=True):
        rendered = template_of(name).render(messages, TOOLS, add_generation_prompt=True)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if name == "hermes-3":  # writes a line break after every tool result but the last
            text, rendered = "".join(text.split()), "".join(rendered.split())
        assert text == rendered


@pytest.mark.parametrize("name", [name for name, (forks, _) in ROWS.items() if not forks and name != "hermes-3"])
async def test_rendering_the_whole_conversation_gives_the_same_tokens_if_the_template_only_appends(name):
    """A template may fork at some turns only; at the others the row continues, reasoning included."""
    chat, choice = prepared(name)
    tokenizer, write, eos = tokenizer_of(name), WRITERS.get(name, hermes), FAMILIES[name].eos
    thought = THOUGHTS.get(name, "").format("Hm. It adds.")
    texts = [text + eos for text in (thought + write((1, 2)), thought + write((3, 4), (5, 6)), "Done.")]
    _, straight, _ = await played(chat, choice, tokenizer, texts, [SYSTEM, ASK])
    chat.rewrites_history = True
    completion, anew, sampled = await played(chat, choice, tokenizer, texts, [SYSTEM, ASK])
    assert anew == straight
    assert_exact(completion, anew, sampled)
    assert len(completion.rows) == 1


@pytest.mark.parametrize("name", ROWS)
async def test_malformed_calls_are_answered_and_counted_and_parallel_results_have_ids(name):
    chat, choice = prepared(name)
    tokenizer, write, eos = tokenizer_of(name), WRITERS.get(name, hermes), FAMILIES[name].eos
    wrong = {
        "mistral": "[TOOL_CALLS]oops",
        "pythonic": "<|tool_call_start|>[add(1)]<|tool_call_end|>",
        "llama3_json": '{"name": "add", "parameters": {',
        "deepseek": deepseek((1, 2)).replace("{", "<"),
    }.get(choice.name, "<tool_call>oops</tool_call>")
    done = "</think>" * (name in BEGUN)
    texts = [done + wrong + eos, done + write((1, 2), (3, 4)) + eos, done + "Done." + eos]
    completion, asked, sampled = await played(chat, choice, tokenizer, texts)
    assert_exact(completion, asked, sampled)
    assert (completion.turns, completion.tool_calls, completion.tool_errors) == (3, 2, 1)
    tools = [message for message in completion.messages if message["role"] == "tool"]
    assert tools[0]["content"].startswith("Error: this tool call could not be read")
    assert tokenizer.decode(asked[1], skip_special_tokens=False).count("this tool call could not be read") == 1
    assert [message["content"] for message in tools[1:]] == ["3", "7"]
    assert all(len(message["tool_call_id"]) == 9 for message in tools)
    calls = completion.messages[2]["tool_calls"]
    assert [call["id"] for call in calls] == [message["tool_call_id"] for message in tools[1:]]


@pytest.mark.parametrize("name", [name for name, (forks, _) in ROWS.items() if forks])
async def test_sampled_ids_stay_in_later_rows(name):
    """The engine's tokens differ from the tokenizer's, so a context re-encoded from text would differ."""
    chat, choice = prepared(name)
    tokenizer, write, eos = tokenizer_of(name), WRITERS.get(name, hermes), FAMILIES[name].eos
    thought = THOUGHTS.get(name, "").format("Hm.")
    call = spelled(tokenizer, write((1, 2)))
    assert tokenizer.encode(write((1, 2)), add_special_tokens=False).ids != call
    texts = [thought + write((1, 2)) + eos, "Done." + eos]
    completion, asked, _ = await played(chat, choice, tokenizer, texts, [SYSTEM, ASK])
    assert len(completion.rows) == 2
    assert holds(asked[1], call)


def holds(ids, part):
    return any(ids[i : i + len(part)] == part for i in range(len(ids)))


async def test_a_template_that_skips_the_reasoning_only_at_the_end_forks_at_every_turn():
    chat, choice = prepared("qwen3", enable_thinking=False)
    assert chat.rewrites_history
    tokenizer = tokenizer_of("qwen3")
    texts = [hermes((1, 2)) + "<|im_end|>", hermes((3, 4)) + "<|im_end|>", "Done.<|im_end|>"]
    completion, asked, sampled = await played(chat, choice, tokenizer, texts)
    assert_exact(completion, asked, sampled)
    assert len(completion.rows) == 3
    last = tokenizer.decode(asked[2], skip_special_tokens=False)
    assert last.count("<think>") == 1
    assert last.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_template_that_requires_tool_calls_does_so_without_tools_too():
    conversation = chat_of("mistral-nemo", None).renderer
    assert conversation.needs_tool_calls
    assert check_history(conversation).rewrites_history


async def test_without_a_system_message_mistral_nemo_continues_in_one_row():
    chat, choice = prepared("mistral-nemo")
    texts = [nemo((1, 2)) + "</s>", nemo((3, 4), (5, 6)) + "</s>", "Done.</s>"]
    completion, asked, sampled = await played(chat, choice, tokenizer_of("mistral-nemo"), texts)
    assert_exact(completion, asked, sampled)
    assert len(completion.rows) == 1


async def test_the_token_budget_counts_what_a_fork_no_longer_shows():
    chat, choice = prepared("qwq")
    tokenizer = tokenizer_of("qwq")
    text = "Hm. " * 50 + "</think>" + hermes((1, 2)) + "<|im_end|>"
    one = len(spelled(tokenizer, text))
    completion, asked, _ = await played(chat, choice, tokenizer, [text] * 50, max_tokens=3 * one)
    assert (completion.turns, completion.truncated) == (3, TruncationReason.LENGTH)
    assert len(asked[2]) - len(asked[0]) < one  # the context has hardly grown
    assert 2 * one < sum(row.sampled_count for row in completion.rows) < 3 * one  # tool results used the rest


class Says:
    """A sampler that returns one turn after another."""

    def __init__(self, turns):
        self.said, self.asked = iter(turns), []

    async def sample(self, prompt_ids, sampling, *, min_policy_version=0):
        ids = next(self.said)[: sampling.max_tokens]
        self.asked.append((list(prompt_ids), ids))
        finish = "stop" if ids[-1] in sampling.stop_token_ids else "length"
        return SampledTurn(ids, [-1.0] * len(ids), finish, [Span(0, 0, len(ids))])


@functools.cache
def prepared_once(name, system):
    return *prepared(name), tokenizer_of(name), [SYSTEM, ASK] if system else [ASK]


ODDITIES = [
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<tool_call>",
    "[TOOL_CALLS]",
    "oops",
    "\n\n",
    " ",
    "é",
    "😀",
    "{",
]


@st.composite
def conversations(draw):
    """Draw a family, whether there is a system message, and a few turns of the model."""
    name = draw(st.sampled_from(sorted(ROWS)))
    write = WRITERS.get(name, hermes)
    calls = [write((1, 2)), write((3, 4), (5, 6))]
    piece = st.one_of(st.sampled_from([*ODDITIES, *calls]), st.text("ab<|>[]{}\n", max_size=5))
    return name, draw(st.booleans()), draw(st.lists(st.lists(piece, max_size=5).map("".join), min_size=1, max_size=4))


@given(conversations())
async def test_rows_hold_exactly_the_contexts_and_the_sampled_turns(conversation):
    name, system, turns = conversation
    chat, choice, tokenizer, messages = prepared_once(name, system)
    sampled = [spelled(tokenizer, text + FAMILIES[name].eos) for text in [*turns, "Done."]]
    engine = Says(sampled)
    async with EnvironmentPool({"sums": factory()}, size=1) as pool:
        group = await GroupRunner(
            chats={"sums": ChatSetup(chat, choice.format)},
            sampler=engine,
            pool=pool,
            limits=RolloutSettings(max_tokens=20_000),
        ).run(Prompt(id="train:0:0", messages=messages, environment="sums", group_size=1))
    (completion,) = decode(encode(group), Group).completions
    assert completion.failure is None
    collate([group])
    ranges = [(row, start, end) for row in completion.rows for start, end in row.sampled_ranges]
    assert len(ranges) == len(engine.asked)
    for (row, start, end), (prompt, answer) in zip(ranges, engine.asked, strict=True):
        assert (row.prompt.tolist() + row.tokens.tolist()[:start], row.tokens.tolist()[start:end]) == (prompt, answer)


class ByTurn(Sums):
    """Rewards each turn by the sum that it computed."""

    def get_reward(self, messages):
        return [float(len(m.get("tool_calls", ()))) for m in messages if m["role"] == "assistant"]


async def test_in_a_fork_every_sampled_token_has_loss_once_and_each_turn_its_own_reward():
    chat, choice = prepared("qwq")
    texts = [f"Hm.</think>{text}<|im_end|>" for text in (hermes((1, 2)), hermes((3, 4), (5, 6)), "Done.")]
    completion, _, output = await played(chat, choice, tokenizer_of("qwq"), texts, environment=ByTurn)
    completion.reward = merge_parts(completion.parts)
    batch = collate([Group(prompt=Prompt(id="train:0:0", messages=[ASK]), completions=[completion])])
    assert batch.completion_ids_R.tolist() == [0, 0, 0]
    assert batch.sampled_RT.sum(dim=1).tolist() == [len(ids) for ids in output]
    assert batch.tokens_RT[batch.sampled_RT].tolist() == [token for ids in output for token in ids]
    rewards = [row[sampled][-1].item() for row, sampled in zip(batch.turn_rewards_RT, batch.sampled_RT, strict=True)]
    assert rewards == [1.0, 2.0, 0.0]
    assert float(batch.turn_rewards_RT.sum()) == 3.0


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("qwen2.5", "hermes"),
        ("qwen3", "hermes"),
        ("qwq", "hermes"),
        ("hermes-3", "hermes"),
        ("granite-4", "hermes"),
        ("llama3.1", "llama3_json"),
        ("mistral-nemo", "mistral"),
        ("ministral-3", "mistral"),
        ("lfm2.5", "pythonic"),
        ("deepseek-r1", "deepseek"),
    ],
)
def test_the_detected_format_parses_what_the_template_writes(name, format_name):
    choice = choose_tool_format("auto", template_of(name), TOOLS)
    assert (choice.name, choice.format) == (format_name, TOOL_FORMATS[format_name])
    assert "writes a call as" in choice.reason


def test_a_template_that_no_format_parses_is_refused_with_the_known_names():
    names = r"set model\.tool_format to .*hermes, mistral, deepseek, pythonic, llama3_json"
    own = template_of("qwen2.5")
    own.source = own.source.replace("<tool_call>", "<invoke>")
    with pytest.raises(SettingsError, match=f"no tool format reads what .*<invoke>.*{names}"):
        choose_tool_format("auto", own, TOOLS)
    with pytest.raises(SettingsError, match=f"neither writes tool calls.*{names}"):
        choose_tool_format("auto", template_of("gemma-2"), TOOLS)
    assert choose_tool_format("pythonic", template_of("gemma-2"), TOOLS).name == "pythonic"


def test_a_template_that_only_describes_a_tag_to_the_model_selects_its_format():
    telling = template_of("gemma-2")
    telling.source = "{% if tools %}Write <tool_call>JSON</tool_call>.{% endif %}" + telling.source
    choice = choose_tool_format("auto", telling, TOOLS)
    assert (choice.name, "describes" in choice.reason) == ("hermes", True)

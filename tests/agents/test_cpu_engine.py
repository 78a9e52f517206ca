"""Real programs against the local engine: a model of a few thousand random weights samples, and never says a word.

Its turns are noise, which no tokenizer would encode as it was sampled. So the rows show whether the sampled tokens are
kept, and each program shows whether it ends.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.agents.played import play
from tests.cases import agent_requests
from tests.cases.families import template_of
from tests.cases.models import write_small_qwen3
from tests.unit.test_episode import END
from workers.local_engine.local_server import EngineLimits, serve_local_engine
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.engine_client.client import EngineClient
from workers.settings import RolloutSettings

pytestmark = [pytest.mark.agents, pytest.mark.timeout(90)]

MAX_LENGTH = 24_576
SMALL = ["--tools", "Bash", "--system-prompt", "You work in a shell."]
"""Options of Claude Code with which its first request has 4 kB instead of 77."""
PROGRAMS = {
    "claude-code": {
        "command": ["claude", "--print", "--permission-mode", "bypassPermissions", *SMALL, "--", "{prompt}"]
    },
    "codex": {},
    "opencode": {},
    "mini-swe-agent": {},
}


class Recording:
    """An engine client that keeps what it was asked, and what it answered."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.sampled, self.answers = [], []
        self.context_length = engine.context_length

    async def sample(self, prompt_ids, options, *, min_policy_version=0):
        answer = await self._engine.sample(prompt_ids, options, min_policy_version=-1)  # no trainer sends a version
        self.sampled.append(list(prompt_ids))
        self.answers.append(list(answer.token_ids))
        return answer


def write_model(folder: Path) -> ChatTokenizer:
    """Write a model; returns its chat, with a tokenizer of four characters a token on what programs send."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        show_progress=False,
        special_tokens=[END, "<|im_start|>", "<|eos|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    texts = [path.read_text() for path in sorted(agent_requests.FOLDER.glob("*.json"))]
    tokenizer.train_from_iterator(texts, trainer)
    write_small_qwen3(folder, tokenizer.get_vocab_size(), layers=1, tied=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_LENGTH}))
    tokenizer.save(str(folder / "tokenizer.json"))
    return ChatTokenizer(tokenizer, template_of("qwen3"), None, {tokenizer.token_to_id("<|eos|>")})


@asynccontextmanager
async def engine_of(folder: Path) -> AsyncIterator[EngineClient]:
    """Serve a model in this process."""
    urls, ready = [], anyio.Event()

    def announce(url):
        urls.append(url)
        ready.set()

    async with anyio.create_task_group() as tasks:
        limits = EngineLimits(2, MAX_LENGTH)
        tasks.start_soon(
            partial(serve_local_engine, folder, port=0, limits=limits, threads=1, dtype="float32", ready=announce)
        )
        await ready.wait()
        async with EngineClient(urls, request_timeout_s=60, max_attempts=3, unavailable_timeout_s=20) as engine:
            await engine.wait_until_ready()
            yield engine
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("name", PROGRAMS)
async def test_rows_are_what_the_engine_was_asked_and_what_it_answered(name, tmp_path, measured):
    chat = await anyio.to_thread.run_sync(write_model, tmp_path / "model")
    async with engine_of(tmp_path / "model") as engine:
        model = Recording(engine)
        assert model.context_length == MAX_LENGTH
        settings = RolloutSettings(max_turns=4, max_tokens_per_turn=24, max_tokens=20_000)
        played = await play(f"agent:{name}", None, model=model, chat=chat, settings=settings, **PROGRAMS[name])
    measured(played)
    played.check_exact()
    answers = []
    for row in played.completion.rows:
        answers += [list(row.tokens[start:end]) for start, end in row.sampled_ranges]
    assert sorted(answers) == sorted(model.answers)
    assert played.seen.fields(None) == []
    assert played.program.exit_code is not None
    assert not played.program.timed_out

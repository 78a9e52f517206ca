"""The local engine as a reward server: transformers' scores in any batch, in vLLM's response format."""

import random
import shutil
from contextlib import asynccontextmanager

import aiohttp
import anyio
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Qwen3ForSequenceClassification

from examples.reward_model.make_models import make_reward_model
from stream.errors import SettingsError
from tests.base_models.demo_model import make_model, make_tokenizer
from workers.local_engine.pooling.classifier import Classifier, ReferenceClassifier, is_classifier
from workers.local_engine.pooling.pooling_server import serve_pooling

pytestmark = pytest.mark.models

CLOSE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward")
    make_reward_model(path, seed=2)
    return path


@pytest.fixture(scope="module")
def classifier(folder) -> Classifier:
    return Classifier.load(folder, max_length=0, dtype="float32")


@pytest.fixture(scope="module")
def plain(folder) -> ReferenceClassifier:
    return ReferenceClassifier(folder)


def conversations(n: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Make conversations of very different lengths."""
    draw = random.Random(seed)
    return [
        [
            {"role": "user", "content": f"What is {draw.randrange(1000)} plus {draw.randrange(1000)}?"},
            {
                "role": "assistant",
                "content": " ".join(str(draw.randrange(10)) for _ in range(draw.choice([1, 9, 150]))),
            },
        ]
        for _ in range(n)
    ]


@asynccontextmanager
async def serving(path, **options):
    urls: list[str] = []
    listening = anyio.Event()

    def ready(url: str) -> None:
        urls.append(url)
        listening.set()

    async def run() -> None:
        await serve_pooling(
            path, **({"port": 0, "max_length": 0, "threads": 1, "dtype": "float32", "ready": ready} | options)
        )

    async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as session:
        tasks.start_soon(run)
        await listening.wait()

        async def ask(status: int = 200, **body):
            async with session.post(urls[0] + "/classify", json=body) as response:
                assert response.status == status, await response.text()
                return await response.json()

        ask.url = urls[0]
        yield ask
        tasks.cancel_scope.cancel()


def test_scores_equal_transformers_in_any_batch(classifier, plain):
    chats = conversations(40)
    expected = [plain.score(chat) for chat in chats]
    assert max(expected) - min(expected) > 2  # the scores differ, so errors would show
    ids = [classifier.render(chat) for chat in chats]
    together = classifier.score(ids)[:, 0].tolist()
    alone = [classifier.score([one])[0, 0].item() for one in ids]
    backwards = classifier.score(ids[::-1])[:, 0].tolist()[::-1]
    assert together == pytest.approx(expected, abs=CLOSE)
    assert alone == pytest.approx(expected, abs=CLOSE)
    assert backwards == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_equal_transformers_with_padding_on_either_side(classifier, folder, side):
    ids = [classifier.render(chat) for chat in conversations(12, seed=1)]
    model = Qwen3ForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    width = max(map(len, ids))
    rows, masks, positions = [], [], []
    for one in ids:
        pad = [model.config.pad_token_id] * (width - len(one))
        zeros, ones = [0] * len(pad), [1] * len(one)
        rows.append(pad + one if side == "left" else one + pad)
        masks.append(zeros + ones if side == "left" else ones + zeros)
        positions.append(zeros + list(range(len(one))) if side == "left" else list(range(width)))
    with torch.no_grad():
        padded = model(
            torch.tensor(rows), attention_mask=torch.tensor(masks), position_ids=torch.tensor(positions)
        ).logits[:, 0]
    assert classifier.score(ids)[:, 0].tolist() == pytest.approx(padded.tolist(), abs=CLOSE)


def test_a_conversation_that_ends_with_the_padding_token_is_scored_at_that_token(classifier, plain):
    pad = make_tokenizer().pad_token_id
    ids = classifier.render(conversations(1)[0])
    with torch.no_grad():
        body = plain._model.model(torch.tensor([[*ids, pad]])).last_hidden_state[0, -1]
        expected = plain._model.score(body).item()
    neighbour = ids * 2
    assert classifier.score([[*ids, pad], neighbour])[0, 0].item() == pytest.approx(expected, abs=CLOSE)
    assert abs(expected - classifier.score([ids])[0, 0].item()) > 0.01  # it is a different sequence


def test_batches_are_bounded_in_tokens_and_scores_stay_in_order(classifier, monkeypatch):
    ids = [classifier.render(chat) for chat in conversations(30, seed=3)]
    whole = classifier.score(ids)
    monkeypatch.setattr("workers.local_engine.pooling.classifier.MAX_TOKENS_PER_PASS", 300)
    assert torch.allclose(classifier.score(ids), whole, atol=CLOSE)


def test_bfloat16_scores_are_close_to_float32(folder, classifier):
    rounded = Classifier.load(folder, max_length=0, dtype="bfloat16")
    ids = [classifier.render(chat) for chat in conversations(20, seed=4)]
    exact, coarse = classifier.score(ids)[:, 0], rounded.score(ids)[:, 0]
    assert torch.corrcoef(torch.stack([exact, coarse]))[0, 1] > 0.99
    assert not torch.equal(exact, coarse)


def test_an_encoders_padding_does_not_change_scores(tmp_path):
    tokenizer = make_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    classifier = Classifier(model, tokenizer, 0)
    ids = [classifier.encode(text, add_special_tokens=False) for text in ("1", "2 3 4 5 6", "7 " * 60)]
    with torch.no_grad():
        alone = [model(torch.tensor([one])).logits[0, 0].item() for one in ids]
    assert classifier.score(ids)[:, 0].tolist() == pytest.approx(alone, abs=CLOSE)


async def test_many_conversations_are_scored_concurrently_over_http(folder, plain):
    chats = conversations(60, seed=5)
    expected = [plain.score(chat) for chat in chats]
    result: dict[int, float] = {}
    async with serving(folder) as ask:

        async def one(i: int) -> None:
            answer = await ask(messages=chats[i], use_activation=False)
            ((result[i],),) = [entry["probs"] for entry in answer["data"]]

        async with anyio.create_task_group() as tasks:
            for i in range(len(chats)):
                tasks.start_soon(one, i)
    assert [result[i] for i in range(len(chats))] == pytest.approx(expected, abs=CLOSE)


async def test_the_answer_has_vllms_format_and_the_activation_is_on_by_default(folder, plain):
    (chat,) = conversations(1)
    async with serving(folder) as ask:
        raw, default, on = [
            await ask(messages=chat, **extra) for extra in ({"use_activation": False}, {}, {"use_activation": True})
        ]
        texts = await ask(input=["a b", "c"], use_activation=False)
        ids = await ask(input=[5, 6, 7], use_activation=False)
    assert set(raw) == {"id", "object", "created", "model", "data", "usage"}
    (entry,) = raw["data"]
    assert (entry["index"], entry["label"], entry["num_classes"]) == (0, "LABEL_0", 1)
    score = entry["probs"][0]
    assert score == pytest.approx(plain.score(chat), abs=CLOSE)
    assert default["data"] == on["data"]
    assert on["data"][0]["probs"][0] == pytest.approx(torch.tensor(score).sigmoid().item(), abs=1e-6)
    assert [entry["index"] for entry in texts["data"]] == [0, 1]
    assert texts["usage"]["prompt_tokens"] == texts["usage"]["total_tokens"] > 2
    assert ids["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "user", "content": "1 " * 600}]}, "tokens and the maximum context length is 512"),
        ({"messages": [[{"role": "user", "content": "a"}]]}, "messages"),
        ({"messages": [{"no": "role"}]}, "chat template"),
        ({"input": []}, "nothing to classify"),
        ({"input": ""}, "nothing to classify"),
        ({"input": ["a", 1]}, "token ids"),
        ({"input": [[99_999]]}, "vocabulary"),
        ({}, "exactly one of messages and input"),
        ({"input": "a", "use_activasion": False}, "use_activasion"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
async def test_invalid_conversations_are_refused_with_a_clear_message(folder, body, words):
    async with serving(folder) as ask:
        answer = await ask(status=400, **body)
    assert words in answer["error"]["message"]


async def test_requests_in_flight_are_answered_during_shutdown(folder):
    """Draining: requests in progress are answered."""
    answers = []
    async with aiohttp.ClientSession() as session, anyio.create_task_group() as asking, serving(folder) as ask:

        async def one(chat) -> None:
            async with session.post(ask.url + "/classify", json={"messages": chat}) as response:
                answers.append(response.status)

        for chat in conversations(20, seed=6):
            asking.start_soon(one, chat)
        async with session.get(ask.url + "/metrics") as response:  # all requests were sent before this one
            await response.read()
    assert answers == [200] * 20


def test_a_model_without_a_score_head_is_refused_instead_of_initialized(tmp_path):
    make_model(tmp_path, seed=0)
    with pytest.raises(
        SettingsError, match=r"not a complete sequence classifier: its files lack the weights score\.weight"
    ):
        Classifier.load(tmp_path, max_length=0, dtype="float32")


def test_an_incomplete_reward_model_is_reported_with_the_file(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(SettingsError, match=f"{file}: not a complete safetensors file: .*metadata"):
        Classifier.load(broken, max_length=0, dtype="float32")


def test_a_folders_config_decides_between_policy_and_reward_model(folder, tmp_path):
    assert is_classifier(folder)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert not is_classifier(tmp_path)
    assert not is_classifier(tmp_path / "nothing")

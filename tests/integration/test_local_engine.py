"""The local engine over HTTP, against transformers' forward pass on the same weights."""

import random
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import gettempdir

import aiohttp
import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from stream.errors import EngineError, SettingsError
from tests.base_models.demo_model import make_model
from workers.engine_api.http_server import listen
from workers.local_engine.local_server import EngineLimits, EngineRoutes, serve_local_engine
from workers.local_engine.scheduler import Scheduler
from workers.local_engine.slot_model import SlotModel
from workers.local_engine.token_sampling import load_tokenizer
from workers.local_engine.weights import EngineAccess
from workers.train.model.policy_folder import load_policy

pytestmark = pytest.mark.models

VOCABULARY, END = 97, 2
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
}


def build(kind: str, seed: int):
    torch.manual_seed(seed)
    if kind == "qwen3-tied":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Folders of weights A, B and C of a tied Qwen3 and an untied Llama."""
    home = tmp_path_factory.mktemp("models")
    result = {}
    for kind in ("qwen3-tied", "llama-untied"):
        for seed, name in enumerate("ABC"):
            result[kind, name] = home / f"{kind}-{name}"
            build(kind, seed).save_pretrained(result[kind, name])
    return result


@cache
def reference(path: Path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def teacher(path: Path, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Return log-probs of `tokens` after `prompt`, from one plain forward pass."""
    with torch.no_grad():
        logits = reference(path)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


class Served:
    """A running engine and a session."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def post(self, path: str, body: object = None, status: int = 200):
        async with self.session.post(self.url + path, json={} if body is None else body) as response:
            answer = await response.json()
            assert response.status == status, answer
            return answer

    async def get(self, path: str):
        async with self.session.get(self.url + path) as response:
            return await response.json()

    async def generate(self, prompt: list[int], *, status: int = 200, **params):
        body = {"token_ids": prompt, "sampling_params": {"logprobs": 0, **params}, "request_id": "r"}
        return await self.post("/inference/v1/generate", body, status)

    async def metric(self, name: str) -> float:
        async with self.session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        (result,) = [float(line.split()[1]) for line in lines if line.startswith(f"vllm:{name} ")]
        return result

    async def until(self, name: str, condition) -> None:
        with anyio.fail_after(10):
            while not condition(await self.metric(name)):
                await anyio.sleep(0.005)

    async def push(self, path: Path, version: str, mode: str = "keep") -> None:
        await self.post(f"/pause?mode={mode}")
        await self.post("/start_weight_update")
        await self.post("/update_weights", {"update_info": {"path": str(path)}})
        await self.post("/finish_weight_update", {"weight_version": version})
        await self.post("/resume")


@asynccontextmanager
async def serving(
    path: Path, *, max_batch: int = 24, max_length: int = 400, trusted: Sequence[Path] = (Path(gettempdir()),)
) -> AsyncIterator[Served]:
    urls: list[str] = []
    listening = anyio.Event()

    def ready(url: str) -> None:
        urls.append(url)
        listening.set()

    async def run() -> None:
        access = EngineAccess(host="127.0.0.1", weight_folders=tuple(trusted))
        options = {"threads": 1, "dtype": "float32", "ready": ready}
        limits = EngineLimits(max_batch, max_length)
        await serve_local_engine(path, access=access, port=0, limits=limits, **options)

    async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as session:
        tasks.start_soon(run)
        await listening.wait()
        yield Served(urls[0], session)
        tasks.cancel_scope.cancel()


def tokens_of(answer) -> list[int]:
    return answer["choices"][0]["token_ids"]


def logprobs_of(answer) -> list[float]:
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == tokens_of(answer)
    return [entry["logprob"] for entry in content]


def reason_of(answer) -> str:
    return answer["choices"][0]["finish_reason"]


def check_by_span(answer, prompt: list[int], weights: dict[str, Path]) -> None:
    """Check every token's log-prob against a plain pass under the weights that its span names."""
    tokens, logprobs = tokens_of(answer), logprobs_of(answer)
    end = 0
    for span in answer["choices"][0]["weight_versions"]:
        assert span["start"] == end < span["end"]
        end = span["end"]
        expected = teacher(weights[span["version"]], prompt, tokens)
        assert logprobs[span["start"] : end] == pytest.approx(expected[span["start"] : end], abs=1e-4)
    assert end == len(tokens) > 0


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama-untied"])
async def test_many_concurrent_requests_equal_a_plain_forward_pass(models, kind: str):
    draw = random.Random(kind)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 120))] for _ in range(48)]
    prompts += [prompts[i % 4] for i in range(16)]  # siblings
    draw.shuffle(prompts)
    answers: dict[int, dict] = {}
    asked = [(draw.choice([0.7, 1.0, 1.3, 0.0]), draw.randint(1, 60)) for _ in prompts]

    async with serving(models[kind, "A"]) as engine, anyio.create_task_group() as tasks:

        async def ask(i: int) -> None:
            temperature, max_tokens = asked[i]
            answer = await engine.generate(prompts[i], temperature=temperature, max_tokens=max_tokens)
            sampled, logprobs = tokens_of(answer), logprobs_of(answer)
            # The next turn of the same episode starts from cached keys and values.
            longer = prompts[i] + sampled + [5, 6, 7]
            after = await engine.generate(longer, temperature=temperature, max_tokens=8)
            answers[i] = {
                "first": (prompts[i], sampled, logprobs),
                "second": (longer, tokens_of(after), logprobs_of(after)),
            }

        for i in range(len(prompts)):
            tasks.start_soon(ask, i)

    for i, (temperature, max_tokens) in enumerate(asked):
        assert len(answers[i]["first"][1]) <= max_tokens
        for prompt, sampled, logprobs in answers[i].values():
            assert logprobs == pytest.approx(teacher(models[kind, "A"], prompt, sampled, temperature), abs=1e-4)


async def test_the_next_turn_computes_only_new_tokens(models):
    async with serving(models["llama-untied", "A"]) as engine:
        prompt = list(range(3, 83))
        sampled = tokens_of(await engine.generate(prompt, max_tokens=10, ignore_eos=True, seed=1))
        before = await engine.metric("prompt_tokens_total")
        await engine.generate([*prompt, *sampled, 8, 9], max_tokens=1)
        assert await engine.metric("prompt_tokens_total") - before == 3  # the last sampled one was never fed
        await engine.post("/reset_prefix_cache")
        await engine.generate([*prompt, *sampled, 8, 9, 10], max_tokens=1)
        assert await engine.metric("prompt_tokens_total") - before == 3 + 93


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama-untied"])
async def test_greedy_sampling_equals_transformers_generate(models, kind: str):
    prompts = [[11, 12, 13], [40] * 30, list(range(50, 70))]
    async with serving(models[kind, "A"]) as engine:
        for prompt in prompts:
            answer = await engine.generate(prompt, temperature=0, max_tokens=40)
            expected = reference(models[kind, "A"]).generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                do_sample=False,
                max_new_tokens=40,
                pad_token_id=0,
            )
            assert tokens_of(answer) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama-untied"])
async def test_weights_updated_in_flight_apply_from_the_token_that_the_span_names(models, kind: str):
    weights = {"none": models[kind, "A"], "7": models[kind, "B"], "8": models[kind, "C"], "9": models[kind, "A"]}
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 60))] for _ in range(12)]
    prompts += prompts[:4]
    answers = {}
    async with serving(models[kind, "A"], max_batch=12) as engine:

        async def ask(i: int) -> None:
            answers[i] = await engine.generate(prompts[i], max_tokens=300, ignore_eos=True)

        async with anyio.create_task_group() as tasks:
            for i in range(len(prompts)):
                tasks.start_soon(ask, i)
            for version in ("7", "8", "9"):
                sampled = await engine.metric("generation_tokens_total")
                await engine.until("generation_tokens_total", lambda n, least=sampled + 200: n > least)
                await engine.push(weights[version], version)
                assert (await engine.get("/weight_info"))["weight_version"] == version
        at_rest = await engine.generate(prompts[0], max_tokens=20)
    seen = [tuple(span["version"] for span in answer["choices"][0]["weight_versions"]) for answer in answers.values()]
    assert ("none", "7", "8", "9") in seen
    for i, answer in answers.items():
        check_by_span(answer, prompts[i], weights)
    assert [span["version"] for span in at_rest["choices"][0]["weight_versions"]] == ["9"]
    check_by_span(at_rest, prompts[0], weights)


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama-untied"])
async def test_weights_updated_when_idle_replace_the_old_ones_completely(models, kind: str):
    prompt = list(range(3, 90))
    async with serving(models[kind, "A"]) as engine:
        assert (await engine.get("/weight_info"))["weight_version"] is None
        for version, name in (("0", "B"), ("1", "C"), ("2", "A")):
            sampled = tokens_of(await engine.generate(prompt, max_tokens=5, ignore_eos=True))
            await engine.push(models[kind, name], version, mode="abort")
            for again in (prompt, [*prompt, *sampled, 4]):  # the next turn starts from cached keys and values
                answer = await engine.generate(again, max_tokens=20, ignore_eos=True)
                check_by_span(answer, again, {version: models[kind, name]})


def spoil(source: Path, target: Path, how: str) -> Path:
    """Copy a model's weights with one error."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    match how:
        case "missing":
            del tensors[name]
        case "unexpected":
            tensors["model.layers.9.surprise"] = torch.zeros(2)
        case "shape":
            tensors[name] = tensors[name][:-1].contiguous()
        case "nan":
            tensors[name][0, 0] = float("nan")
        case "untied":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    file = target / "model.safetensors"
    save_file(tensors, file)
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    if how == "absent":
        file.unlink()
    return target


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("missing", "missing: model.layers.1.mlp.up_proj.weight"),
        ("unexpected", "unexpected: model.layers.9.surprise"),
        ("shape", "model.layers.1.mlp.up_proj.weight (63, 48) instead of (64, 48)"),
        ("nan", "not finite: model.layers.1.mlp.up_proj.weight"),
        ("untied", "tied in the model, but different in the update: "),
        ("cut", "cannot be read as safetensors"),
        ("absent", "cannot be read as safetensors"),
    ],
)
async def test_invalid_weights_are_refused_and_the_old_ones_stay(models, tmp_path: Path, how: str, named: str):
    kind = "qwen3-tied"
    bad = await anyio.to_thread.run_sync(spoil, models[kind, "B"], tmp_path / how, how)
    async with serving(models[kind, "A"]) as engine:
        await engine.push(models[kind, "A"], "3")
        await engine.post("/pause?mode=keep")
        await engine.post("/start_weight_update")
        refused = await engine.post("/update_weights", {"update_info": {"path": str(bad)}}, 400)
        assert named in refused["error"]["message"]
        early = await engine.post("/finish_weight_update", {"weight_version": "4"}, 400)
        assert "pause, start_weight_update, update_weights, finish_weight_update, resume" in early["error"]["message"]
        await engine.post("/resume")
        answer = await engine.generate([4, 5, 6], max_tokens=20)
        check_by_span(answer, [4, 5, 6], {"3": models[kind, "A"]})
        await engine.push(models[kind, "C"], "4")  # and a good push succeeds afterwards
        check_by_span(await engine.generate([4, 5, 6], max_tokens=20), [4, 5, 6], {"4": models[kind, "C"]})


def test_incomplete_weights_are_reported_with_the_file(models, tmp_path: Path):
    broken = shutil.copytree(models["llama-untied", "A"], tmp_path / "broken")
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    for load in (partial(SlotModel.load, slots=2, max_length=64, dtype="float32"), load_policy):
        with pytest.raises(SettingsError, match=f"{file}: not a complete safetensors file: .*; copy it again"):
            load(broken)


def test_a_model_with_a_missing_weight_is_refused_instead_of_initialized(models, tmp_path: Path):
    broken = shutil.copytree(models["llama-untied", "A"], tmp_path / "broken")
    file = broken / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}, file)
    with pytest.raises(SettingsError, match=r"not a complete causal model: its files lack the weights lm_head\.weight"):
        SlotModel.load(broken, slots=2, max_length=64, dtype="float32")


def test_an_incomplete_tokenizer_is_reported_and_a_missing_one_is_allowed(tmp_path: Path):
    assert load_tokenizer(tmp_path) is None
    file = tmp_path / "tokenizer.json"
    file.write_text('{"version": ')
    with pytest.raises(EngineError, match=f"{file} is not a readable tokenizer"):
        load_tokenizer(tmp_path)


async def test_control_routes_out_of_order_are_refused(models):
    path = {"update_info": {"path": str(models["qwen3-tied", "B"])}}
    async with serving(models["qwen3-tied", "A"]) as engine:
        await engine.post("/start_weight_update", status=400)
        await engine.post("/update_weights", path, 400)
        await engine.post("/finish_weight_update", {"weight_version": "1"}, 400)
        await engine.post("/pause?mode=sometimes", status=400)
        await engine.post("/pause?mode=keep")
        await engine.post("/update_weights", path, 400)
        await engine.post("/start_weight_update")
        await engine.post("/update_weights", {"path": "x"}, 400)
        await engine.post("/update_weights", path)
        await engine.post("/resume", status=400)  # the live weights have no version yet
        await engine.post("/finish_weight_update", {"weight_version": "1"})
        await engine.post("/resume")
        assert (await engine.get("/weight_info"))["weight_version"] == "1"


async def test_a_model_in_several_files_is_loaded(models, tmp_path: Path):
    def shard() -> None:
        reference(models["llama-untied", "B"]).save_pretrained(tmp_path, max_shard_size="40KB")

    await anyio.to_thread.run_sync(shard)
    assert not (tmp_path / "model.safetensors").exists()
    async with serving(models["llama-untied", "A"]) as engine:
        await engine.push(tmp_path, "5")
        answer = await engine.generate([9, 8], max_tokens=20)
        check_by_span(answer, [9, 8], {"5": models["llama-untied", "B"]})


async def test_a_paused_engine_holds_requests_and_continues_them_after_resume(models):
    kind = "llama-untied"
    answers = []
    async with serving(models[kind, "A"], max_batch=2) as engine:

        async def ask(prompt: list[int]) -> None:
            answers.append((prompt, await engine.generate(prompt, max_tokens=200, ignore_eos=True)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, [3, 4])
            await engine.until("generation_tokens_total", lambda n: n > 10)
            await engine.post("/pause?mode=keep")
            assert await engine.get("/is_paused") == {"is_paused": True}
            frozen = await engine.metric("generation_tokens_total")
            tasks.start_soon(ask, [5, 6, 7])
            await engine.until("num_requests_waiting", lambda n: n == 1)
            await anyio.sleep(0.1)
            assert await engine.metric("generation_tokens_total") == frozen
            assert not answers
            await engine.post("/resume")
        for prompt, answer in answers:
            check_by_span(answer, prompt, {"none": models[kind, "A"]})


async def test_pausing_with_wait_finishes_running_requests(models):
    answers = []
    async with serving(models["llama-untied", "A"], max_batch=1) as engine:

        async def ask() -> None:
            answers.append(await engine.generate([3, 4], max_tokens=150, ignore_eos=True))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await engine.until("generation_tokens_total", lambda n: n > 3)
            tasks.start_soon(ask)
            await engine.until("num_requests_waiting", lambda n: n == 1)
            await engine.post("/pause?mode=wait")
            assert await engine.metric("num_requests_running") == 0
            assert await engine.metric("num_requests_waiting") == 1
            await engine.post("/resume")
    assert [len(tokens_of(answer)) for answer in answers] == [150, 150]


async def test_pausing_with_abort_ends_every_request_with_finish_reason_abort(models):
    answers = []
    async with serving(models["llama-untied", "A"], max_batch=1) as engine:

        async def ask() -> None:
            answers.append(await engine.generate([3, 4], max_tokens=390, ignore_eos=True))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await engine.until("generation_tokens_total", lambda n: n > 3)
            tasks.start_soon(ask)
            await engine.until("num_requests_waiting", lambda n: n == 1)
            await engine.post("/pause?mode=abort")
        assert [reason_of(answer) for answer in answers] == ["abort", "abort"]
        assert sorted(bool(tokens_of(answer)) for answer in answers) == [False, True]


async def test_a_closed_connection_aborts_its_request(models):
    async with serving(models["llama-untied", "A"], max_batch=1) as engine:
        with anyio.move_on_after(10) as scope:
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(lambda: engine.generate([3, 4], max_tokens=390, ignore_eos=True))
                await engine.until("generation_tokens_total", lambda n: n > 3)
                scope.cancel()
        await engine.until("num_requests_running", lambda n: n == 0)
        await engine.until("num_requests_waiting", lambda n: n == 0)
        assert await engine.metric("generation_tokens_total") < 390


async def test_the_finish_reason_is_stop_or_length(models):
    prompt = [30, 31, 32]
    async with serving(models["llama-untied", "A"], max_length=64) as engine:
        free = tokens_of(await engine.generate(prompt, temperature=0, max_tokens=20, ignore_eos=True))
        stop = free[7]
        answer = await engine.generate(prompt, temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
        assert reason_of(answer) == "stop"
        assert tokens_of(answer) == free[: free.index(stop) + 1]
        full = await engine.generate(prompt, max_tokens=1000, ignore_eos=True)
        assert (reason_of(full), len(tokens_of(full))) == ("length", 64 - 3)
        ended: list[dict] = []

        async def ask(seed: int) -> None:
            ended.append(await engine.generate(prompt, max_tokens=60, seed=seed))

        async with anyio.create_task_group() as tasks:
            for seed in range(40):
                tasks.start_soon(ask, seed)
    assert {reason_of(answer) for answer in ended} == {"stop", "length"}
    assert all((tokens_of(a)[-1] == END) == (reason_of(a) == "stop") for a in ended)


async def test_a_bias_forces_a_token_and_min_tokens_delays_the_stop_token(models):
    bias = {str(END): 100.0, "7": 50.0}
    async with serving(models["llama-untied", "A"]) as engine:
        answer = await engine.generate([3], max_tokens=9, min_tokens=5, logit_bias=bias)
        own = await engine.generate([3], max_tokens=9, min_tokens=2, logit_bias={"7": 100.0}, stop_token_ids=[7])
    assert (tokens_of(answer), reason_of(answer)) == ([7] * 5 + [END], "stop")
    assert logprobs_of(answer) == pytest.approx([0.0] * 6, abs=1e-6)
    assert (tokens_of(own).index(7), len(tokens_of(own)), reason_of(own)) == (2, 3, "stop")


async def test_a_stop_string_ends_a_turn_with_the_token_that_completes_it(tmp_path):
    await anyio.to_thread.run_sync(make_model, tmp_path, 1)
    token = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("a")
    forced = {"max_tokens": 6, "logit_bias": {str(token): 100.0}}
    async with serving(tmp_path) as engine:
        answers = [
            await engine.generate([3], **forced, **more)
            for more in ({"stop": ["nowhere"]}, {"stop": ["nowhere", "aaa"]}, {"stop": ["aa"], "min_tokens": 4})
        ]
    assert [(len(tokens_of(answer)), reason_of(answer)) for answer in answers] == [
        (6, "length"),
        (3, "stop"),
        (5, "stop"),
    ]


async def test_a_seed_decides_what_is_sampled(models):
    async with serving(models["llama-untied", "A"]) as engine:
        samples = [tokens_of(await engine.generate([3], max_tokens=30, ignore_eos=True, seed=s)) for s in (1, 1, 2)]
        free = [tokens_of(await engine.generate([3], max_tokens=30, ignore_eos=True)) for _ in range(2)]
    assert samples[0] == samples[1] != samples[2]
    assert free[0] != free[1]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"token_ids": list(range(64))}, "maximum context length is 64"),
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [VOCABULARY]}, f"vocabulary of {VOCABULARY}"),
        ({"token_ids": [-1]}, f"vocabulary of {VOCABULARY}"),
        ({"token_ids": [1], "stream": True}, "stream"),
        (
            {"token_ids": [1], "sampling_params": {"beam": 3, "best_of": 2}},
            "unknown sampling parameters: beam, best_of",
        ),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "$.sampling_params.temperature"),
        ({"token_ids": "1"}, "$.token_ids"),
        ({"token_ids": [1], "sampling_params": {"stop": ["x"]}}, "stop: this model has no tokenizer.json"),
        ({"token_ids": [1], "sampling_params": {"logit_bias": {"9999": 1}}}, "logit_bias or stop_token_ids holds 9999"),
        ({"token_ids": [1], "sampling_params": {"min_tokens": 9, "max_tokens": 8}}, "min_tokens (9)"),
        ({"token_ids": [1], "sampling_params": {"repetition_penalty": 2.0}}, "unknown sampling parameters"),
        ([], "bad request"),
    ],
)
async def test_invalid_requests_are_refused_with_the_parameters_name(models, body: object, named: str):
    async with serving(models["llama-untied", "A"], max_length=64) as engine:
        refused = await engine.post("/inference/v1/generate", body, 400)
    assert named in refused["error"]["message"]


async def test_the_info_routes_describe_model_and_version(models):
    path = models["llama-untied", "A"]
    async with serving(path, max_length=10_000) as engine:
        (model,) = (await engine.get("/v1/models"))["data"]
        assert (model["id"], model["max_model_len"]) == (str(path), 512)  # the model has no more positions
        assert (await engine.get("/version"))["version"].startswith("penstock-")


async def test_after_a_generation_failure_every_request_is_answered_and_health_reports_it(models):
    slots = await anyio.to_thread.run_sync(
        lambda: SlotModel.load(models["llama-untied", "A"], slots=4, max_length=64, dtype="float32")
    )

    def broken(**_: object) -> None:
        raise RuntimeError("the memory is full")

    slots.model = broken
    loop = anyio.lowlevel.current_token().native_token
    scheduler = Scheduler(slots, 2, lambda mail: loop.call_soon_threadsafe(lambda: [one.wake() for one in mail]))
    async with (
        listen(EngineRoutes(scheduler, slots, "broken").application(), "127.0.0.1", 0) as url,
        aiohttp.ClientSession() as session,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(anyio.to_thread.run_sync, scheduler.run, 1)
        engine = Served(url, session)
        try:
            for _ in range(2):
                failed = await engine.generate([1, 2], status=500)
                assert "the memory is full" in failed["error"]["message"]
            await engine.post("/pause?mode=keep", status=500)
            async with session.get(f"{url}/health") as response:
                assert response.status == 503
                assert "the memory is full" in await response.text()
        finally:
            scheduler.stop()

"""Checks across keys: combinations that cannot work, or in which a key has no effect, are refused before a start.

Each check takes the settings and yields messages that name both keys and the remedy. Those of `[filter]`,
`[estimator]`, `[algorithm]`, `[loss]` and `[correction]` are in `algorithm_checks`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from urllib.parse import urlsplit

from stream.errors import SettingsError
from workers.settings import algorithm_checks
from workers.settings.data import DatasetSettings, DataSettings
from workers.settings.rollout import EvalSettings
from workers.settings.settings import Settings
from workers.settings.training import DNS_PREFIX, FILE_PREFIX, LOOPBACK_HOSTS


def check_rewards(s: Settings) -> Iterator[str]:
    """`[[rewards]]`: something measures a reward, and the parts have different names."""
    if not s.environments and not s.rewards:
        yield "neither [environments] nor [[rewards]] is set, so nothing would measure a reward; add one"
    names = [reward.name or reward.ref.rpartition(":")[2] for reward in s.rewards]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield (
                f"rewards[{names.index(name)}] and rewards[{index}] both have the name {name!r}, so their "
                "parts could not be distinguished; give one of them another name"
            )
        if name == "env":
            yield f"rewards[{index}].name is 'env', the name of the environment's own part; choose another name"
    for index, reward in enumerate(s.rewards):
        if not math.isfinite(reward.weight):
            yield f"rewards[{index}].weight is {reward.weight}, so no reward would be finite; set a finite number"
        for name in reward.environments:
            if name not in s.environments:
                known = ", ".join(s.environments) or "none"
                yield f"rewards[{index}].environments names {name!r}, which is unknown; [environments] has: {known}"


def check_places(s: Settings) -> Iterator[str]:
    """`[data]` and `[eval]`: configuration, split and revision are of a data set that is named."""
    held_out = {"eval": s.eval} if s.eval.source else {}
    tables: dict[str, DataSettings | DatasetSettings | EvalSettings] = {"data": s.data, **held_out}
    tables |= {f"data.sets[{i}]": each for i, each in enumerate(s.data.sets)}
    for name, table in tables.items():
        for key in ("config", "split", "revision"):
            if getattr(table, key) and not table.path:
                yield f"{name}.{key} is set, but {name}.path names no data set; set it too, or leave the first out"
            elif key == "split" and table.split and "#" in table.path:
                yield f"{name}.path names a split after its # and {name}.split another; leave out one of them"


def check_datasets(s: Settings) -> Iterator[str]:
    """`[data]`: one data set or several, and environments that exist."""
    given = sum(map(bool, (s.data.path, s.data.rows, s.data.sets)))
    if given > 1 or (not given and not s.environments):
        count = "several are" if given else "none is"
        yield (
            "data.path names one data set, [[data.sets]] several, data.rows counts problems that the environment "
            f"makes, and {count} set; set one of them"
        )
    for index, dataset in enumerate(s.data.sets):
        if bool(dataset.path) == bool(dataset.rows) and (dataset.path or not dataset.environment):
            yield (
                f"data.sets[{index}] needs either path, a file, or rows, a number of problems, or an environment with "
                "its own rows(); set one of them"
            )
    if (s.data.rows or any(dataset.rows for dataset in s.data.sets)) and not s.environments:
        yield "data.rows counts problems that the environment makes, but [environments] is empty; name one, or a file"
    has_weight = [dataset.weight > 0 for dataset in s.data.sets]
    if any(has_weight) and not all(has_weight):
        yield "some of [[data.sets]] have a weight and some have none; give all of them a weight, or none"
    for index, dataset in enumerate(s.data.sets):
        if dataset.environment and dataset.environment not in s.environments:
            known = ", ".join(s.environments) or "none"
            yield f"data.sets[{index}].environment {dataset.environment!r} is unknown; [environments] has: {known}"
    if not s.data.prompt and not s.environments:
        yield "data.prompt is empty, so prompts come from reset, but [environments] is empty; name the prompt column"


def is_http_url(text: str) -> bool:
    """Return whether a text is `http://HOST...` or `https://HOST...`."""
    try:
        parts = urlsplit(text.strip())
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)


def check_engines(s: Settings) -> Iterator[str]:
    """`[engine]`: engines are either named or started."""
    engine = s.engine
    for url in engine.named_urls:
        if not is_http_url(url):
            yield f"engine.urls: {url!r} is not the URL of an engine; write it as http://HOST:PORT"
    if FILE_PREFIX in engine.urls:
        yield f"engine.urls: {FILE_PREFIX!r} names no file; write {FILE_PREFIX}PATH"
    if any(url.startswith(f"{DNS_PREFIX}https:") for url in engine.urls):
        yield (
            f"engine.urls has {DNS_PREFIX}https, but engines behind a name are reached by address, for which no "
            "certificate is valid; write http, or list the engines one by one"
        )
    for key in engine.non_default("count", "devices"):
        if engine.urls:
            yield f"engine.{key} is set, but engine.urls names the engines, so none is started; leave one of them out"
    for key in engine.non_default("python", "flags"):
        if engine.server == "local":
            yield f"engine.{key} is for vLLM, but engine.server is 'local'; set that to 'vllm', or leave the first out"
    if engine.devices and engine.server == "local" and not engine.urls:
        yield (
            "engine.devices names GPUs for vLLM, but engine.server is 'local', which computes on the CPU; set that to "
            "'vllm', or leave the first out"
        )
    elif engine.devices and len(engine.devices) != engine.count:
        yield (
            f"engine.devices is for {len(engine.devices)} engines and engine.count is {engine.count}; name the GPUs of "
            "each engine, or of none"
        )


def check_weights(s: Settings) -> Iterator[str]:
    """`[weights]`: engines can reach the weights."""
    weights = s.weights
    if weights.transport == "adapter":
        if not s.lora.rank:
            yield "weights.transport is 'adapter', but lora.rank is 0, so there is no adapter; set one of the two"
        if weights.kv_cache == "keep":
            yield (
                "weights.kv_cache is set, but with weights.transport = 'adapter' running requests keep their adapter; "
                "leave the first out"
            )
    remote = [url for url in s.engine.named_urls if is_http_url(url) and urlsplit(url).hostname not in LOOPBACK_HOSTS]
    if weights.transport in {"http", "nccl"} and s.run.host in LOOPBACK_HOSTS and remote:
        yield (
            f"run.address is {s.run.address!r}, by which {remote[0]} cannot reach the trainer for weights.transport = "
            f"{weights.transport!r}; set it to a name or address of the trainer's machine on the engines' network"
        )


MIN_VLLM_TEMPERATURE: Final = 0.01
"""vLLM raises a smaller temperature above 0 to this value."""


def check_rollout(s: Settings) -> Iterator[str]:
    """`[rollout]`: completions of a group can differ."""
    if s.rollout.temperature == 0 and s.train.learning_rate > 0:
        yield (
            "rollout.temperature is 0, so all completions of a group are equal and nothing can be learned while "
            "train.learning_rate is above 0; raise the first or set the second to 0"
        )


def check_sampling(s: Settings) -> Iterator[str]:
    """`rollout.sampling` and temperatures: every value works with every engine."""
    sampling = s.rollout.sampling
    for key in ("max_tokens_per_turn", "max_tokens"):
        if sampling.min_tokens > (most := getattr(s.rollout, key)):
            yield (
                f"rollout.sampling.min_tokens ({sampling.min_tokens}) is more than rollout.{key} ({most}); "
                "lower the first or raise the second"
            )
    if "" in sampling.stop:
        yield "rollout.sampling.stop has an empty string, which would end every turn before it begins; leave it out"
    if any(token < 0 for token in sampling.logit_bias):
        yield (
            f"rollout.sampling.logit_bias has the key {min(sampling.logit_bias)}, which is not a token id; leave it out"
        )
    for key, temperature in (("rollout", s.rollout.temperature), ("eval", s.eval.temperature)):
        if 0 < temperature < MIN_VLLM_TEMPERATURE:
            yield (
                f"{key}.temperature is {temperature:g}, but vLLM raises values between 0 and {MIN_VLLM_TEMPERATURE:g} "
                f"to {MIN_VLLM_TEMPERATURE:g}; set it to 0 or to that"
            )


def check_evaluation(s: Settings) -> Iterator[str]:
    """`[eval]`: there are held-out prompts, and completions of one can differ."""
    if not s.eval.source:
        for key in s.eval.non_default():
            yield (
                f"eval.{key} is set, but eval.path is empty and eval.rows is 0, so nothing is evaluated; set one, "
                "or leave it out"
            )
        return
    if s.eval.path and s.eval.rows:
        yield "eval.path names a file, eval.rows counts problems that the environment makes; set one of the two"
    if s.eval.rows and not s.environments:
        yield "eval.rows counts problems that the environment makes, but [environments] is empty; set eval.path"
    if s.eval.temperature == 0 and s.eval.group_size > 1:
        yield (
            f"eval.temperature is 0, so all {s.eval.group_size} completions of a prompt (eval.group_size) are the "
            "same; raise the first or set the second to 1"
        )


def check_trainer(s: Settings) -> Iterator[str]:
    """`[train]`: the attention kernel supports the model's type."""
    if s.train.attention in {"flash_attention_2", "flash_attention_3"} and s.model.dtype == "float32":
        yield (
            f"train.attention = {s.train.attention!r} supports half precision only, but model.dtype is 'float32'; set "
            "the second to 'bfloat16', or the first to 'auto', 'sdpa' or 'varlen'"
        )


def check_lora(s: Settings) -> Iterator[str]:
    """`[lora]`: the adapter has a rank and layers."""
    if not s.lora.rank:
        for key in s.lora.non_default():
            yield f"lora.{key} is set, but lora.rank is 0, so there is no adapter; set it too, or leave it out"
        return
    if not s.lora.target_modules:
        yield "lora.target_modules is empty, so lora.rank has no effect; leave it out for every linear layer"
    if "all-linear" in s.lora.target_modules and len(s.lora.target_modules) > 1:
        yield "lora.target_modules has names beside 'all-linear', which includes them; leave out one or the other"


Check = Callable[[Settings], Iterator[str]]

ENGINE_CHECKS: Final[tuple[Check, ...]] = (check_engines, check_weights, check_lora)
"""Checks of the keys that an engine reads."""
RUN_CHECKS: Final[tuple[Check, ...]] = (
    check_rewards,
    check_places,
    check_datasets,
    check_engines,
    check_weights,
    check_rollout,
    check_sampling,
    check_evaluation,
    algorithm_checks.check_filters,
    algorithm_checks.check_estimator,
    algorithm_checks.check_estimator_inputs,
    algorithm_checks.check_overlong,
    algorithm_checks.check_zero_reward,
    check_trainer,
    algorithm_checks.check_loss,
    algorithm_checks.check_preset,
    algorithm_checks.check_correction,
    algorithm_checks.check_rejection,
    check_lora,
)


def check_combinations(settings: Settings, source: str, checks: Sequence[Check] = RUN_CHECKS) -> None:
    """Refuse combinations that cannot work, all at once.

    Args:
        settings: of a run.
        source: file or other place that they come from, for the message.
        checks: which combinations matter.

    Raises:
        SettingsError: names for each of them both keys and the remedy.
    """
    problems = [problem for check in checks for problem in check(settings)]
    if len(problems) > 1:
        problems = [f"({i}) {problem}" for i, problem in enumerate(problems, 1)]
    if problems:
        raise SettingsError(f"{source}: {'; '.join(problems)}")

"""Checks the chat template with the tools of each environment, and that prompts leave room for an answer."""

from collections.abc import Mapping
from typing import Final

from stream.errors import PenstockError
from stream.records import Prompt
from workers.check.environment import CheckedEnvironment
from workers.check.report import Checker
from workers.rollout.chat.chat_setup import ChatSetup, load_chat_setups
from workers.rollout.messages import append_observation

_MAX_PROMPTS: Final = 32
"""Prompts of each environment that are rendered."""


def check_chats(
    checker: Checker, prompts: list[Prompt], environments: Mapping[str, CheckedEnvironment], max_positions: int
) -> None:
    """Report faults of the chat template, and prompts that are too long.

    Args:
        checker: collects the findings.
        prompts: first prompts of the data.
        environments: those that could be made.
        max_positions: longest sequence of the model; 0 if unknown.
    """
    settings = checker.settings
    folder = settings.model.folder
    factories = {name: environment.factory for name, environment in environments.items()}
    names: list[str | None] = list(factories) or ([None] if not settings.environments else [])
    for name in names:
        try:
            setup = load_chat_setups(settings, folder, {name: factories[name]} if name else {})[name]
        except PenstockError as error:
            checker.about("chat template", "model.path").error(error)
            continue
        except Exception as error:  # noqa: BLE001  (a template is foreign code)
            checker.about("chat template", "model.path").error(f"{type(error).__name__}: {error}")
            continue
        if name:
            _check_tools(name, setup, environments[name], checker)
        _check_lengths(name, setup, prompts, environments.get(name or ""), checker, max_positions)
        checker.checked.append(f"chat template{f' with the tools of {name}' if name else ''}")
    _check_max_positions(checker, max_positions)


def _check_tools(name: str, setup: ChatSetup, environment: CheckedEnvironment, checker: Checker) -> None:
    factory = environment.factory
    if not factory.tools or not checker.settings.data.chat_template_kwargs.get("tools", True):
        return
    prompt = setup.chat.renderer.render_prompt([{"role": "user", "content": "u"}])
    if hidden := [tool.name for tool in factory.tools if tool.name not in prompt]:
        checker.about(f"environment {name}", "model.path").warn(
            f"the chat template does not show the tool {hidden[0]} to the model",
            "describe the tools in data.system, or use a model whose template does",
        )


def _check_lengths(
    name: str | None,
    setup: ChatSetup,
    prompts: list[Prompt],
    environment: CheckedEnvironment | None,
    checker: Checker,
    max_positions: int,
) -> None:
    """Compare prompt and completion with `engine.max_model_len`."""
    settings = checker.settings
    of_name = [prompt for prompt in prompts if prompt.environment == name][:_MAX_PROMPTS]
    observation = environment.trial.observation if environment else None
    longest, row = 0, ""
    for prompt in of_name:
        messages = prompt.messages
        if environment and (environment.prompt is prompt or not settings.data.prompt):
            messages = append_observation(messages, observation)
        try:
            tokens = len(setup.chat.prompt_ids(messages))
        except PenstockError as error:
            checker.about("chat template", "data.prompt").error(f"row {prompt.id}: {error}")
            return
        if tokens > longest:
            longest, row = tokens, prompt.id
    limit, wanted = settings.max_model_len, settings.rollout.max_tokens
    if max_positions and not settings.engine.max_model_len:
        limit = min(limit, max_positions)
    if settings.engine.urls or not longest:
        return
    key, enough = "engine.max_model_len", longest + wanted
    can_grow = not max_positions or enough <= max_positions
    remedy = f"set {key} = {_round_up(enough)}, or lower rollout.max_tokens" if can_grow else "lower rollout.max_tokens"
    if longest >= limit:
        message = f"the prompt of row {row} has {longest} tokens, and {key} = {limit} leaves no room for an answer"
        checker.about("lengths", key).error(message, remedy if can_grow else "shorten the prompts")
    elif enough > limit:
        cut = f"so completions are cut at {limit - longest} tokens"
        sums = f"a prompt of {longest} tokens (row {row}) and rollout.max_tokens = {wanted}"
        checker.about("lengths", key).warn(f"{sums} are more than {key} = {limit}, {cut}", remedy)


def _check_max_positions(checker: Checker, max_positions: int) -> None:
    settings = checker.settings
    limit = settings.engine.max_model_len
    if max_positions and limit > max_positions and not settings.engine.urls:
        lengths = checker.about("lengths", "engine.max_model_len")
        add = lengths.error if settings.engine.server == "vllm" else lengths.warn
        add(
            f"{limit} tokens are more than the {max_positions} that the model was made for (max_position_embeddings in "
            "its config.json)",
            f"set it to {max_positions} or less",
        )


def _round_up(tokens: int) -> int:
    return -(-tokens // 256) * 256

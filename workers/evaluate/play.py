"""Play an environment against a model folder or an endpoint, print the conversations, and summarize the rewards."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog
from msgspec import Struct
from rich.console import Console

from envs.factory import EnvironmentFactory, first_row
from stream.errors import SettingsError
from stream.records import Group, Message, Prompt
from stream.validity import Measured, Unmeasured
from stream.waiting import run_in_daemon_thread
from workers.check.user_code import try_reset
from workers.evaluate.chat_endpoint import open_chat_endpoint
from workers.evaluate.chat_episode import play_group
from workers.evaluate.evaluate import find_policy_folder
from workers.evaluate.standalone_rollout import roll_out_and_score
from workers.evaluate.temporary_engine import with_existing_engine, with_started_engine
from workers.launch.process import run_async
from workers.role.exit_codes import ExitCode
from workers.role.log_setup import configure_logging
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.runs.export import completion_record, write_export
from workers.runs.groups import CompletionView
from workers.settings import EnvironmentSettings, RewardSettings, Settings
from workers.settings.secrets import max_positions
from workers.settings.toml_file import settings_for_model, write_overrides
from workers.terminal.lines import completion_lines
from workers.terminal.output import print_json

_ROWS_TIMEOUT_S = 60.0
_PROMPT_TOKENS = 4096
"""Tokens of an engine's context that are kept for the prompt, if the model has as many positions."""
_NO_MODEL = Path("no-model")
"""Takes the place of the model's folder in the settings if an endpoint serves the model."""


class PlayOptions(Struct, frozen=True, kw_only=True):
    """What to play, and against what."""

    ref: str
    """Reference of the environment."""
    args: Mapping[str, Any] = {}
    """Arguments of its factory."""
    fields: Mapping[str, Any] = {}
    """Columns of the row."""
    prompt: str = ""
    """The user's text; empty: what `reset` returns, or the row's column `prompt`."""
    rewards: tuple[str, ...] = ()
    """References of reward functions."""
    count: int = 8
    """Number of episodes, all of one prompt."""
    seed: int = 0
    """Seed of the prompt."""
    policy: Path | None = None
    """A model folder, a checkpoint, or a run."""
    endpoint: str = ""
    """URL of a server: with `policy`, an engine that serves it; without, any OpenAI-compatible server."""
    model: str = ""
    """Name of the endpoint's model; empty: the first one that it lists."""
    overrides: tuple[str, ...] = ()
    """Values of single settings."""
    out: Path | None = None
    """New file for the completions, as JSON lines."""


def play(
    environment: str | Mapping[str, Any],
    *,
    policy: str | Path | None = None,
    endpoint: str = "",
    n: int = 8,
    fields: Mapping[str, Any] | None = None,
    prompt: str = "",
    rewards: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Group:
    """Play an environment against a model, and score the episodes. Needs neither a run nor a Redis server.

    Args:
        environment: a reference, or a mapping with `ref` and `args` as in the settings' table `[environments]`.
        policy: a model folder, a checkpoint or a run, served by an engine that is started for this call.
        endpoint: URL of a server: with `policy`, an engine that serves it; without, any OpenAI-compatible server.
        n: number of episodes, all of one prompt.
        fields: columns of the prompt's row, for `reset` and the reward functions.
        prompt: the user's text; empty: what `reset` returns, or the row's column `prompt`.
        rewards: references of reward functions.
        overrides: values of single settings, for example `{"rollout.max_tokens": 64}`.

    Returns:
        The group: each of its `completions` has messages, rows of tokens, and a reward or the reason for none.

    Raises:
        PenstockError: the environment or the model cannot be loaded, or no server answers.
    """
    named = msgspec.convert({"ref": environment} if isinstance(environment, str) else environment, EnvironmentSettings)
    options = PlayOptions(
        ref=named.ref,
        args=named.args,
        fields=fields or {},
        prompt=prompt,
        rewards=tuple(rewards),
        count=n,
        policy=None if policy is None else Path(policy),
        endpoint=endpoint,
        overrides=write_overrides(overrides or {}),
    )
    if not structlog.is_configured():
        configure_logging("play", level="error")
    return run_in_daemon_thread(partial(play_options, options))


async def play_options(options: PlayOptions) -> Group:
    """Play the episodes that the options describe.

    Raises:
        PenstockError: see `play`.
    """
    if options.policy is None and not options.endpoint:
        raise SettingsError(
            "give a model: --policy FOLDER, or --endpoint URL of an OpenAI-compatible server; "
            "`penstock check` tries an environment without one"
        )
    folder = None if options.policy is None else await anyio.to_thread.run_sync(find_policy_folder, options.policy)
    return await sample_group(options, play_settings(options, folder), folder)


def play_and_print(options: PlayOptions, *, as_json: bool = False) -> int:
    """Play the episodes and print them. Returns the exit code: 1 if no reward was measured.

    Raises:
        PenstockError: the environment or the model cannot be loaded, or no server answers.
    """
    group = run_async(partial(play_options, options))
    views = [CompletionView(group=group, completion=completion, outcome="played") for completion in group.completions]
    summary = summarize_rewards(group)
    if options.out is not None:
        write_export(options.out, map(completion_record, views), "jsonl")
    if as_json:
        print_json(
            {"ref": options.ref, **msgspec.to_builtins(summary), "completions": list(map(completion_record, views))}
        )
    else:
        console = Console(highlight=False)
        for completion in group.completions:
            console.rule(f"episode {completion.index + 1} of {options.count}", style="bright_black")
            for line in completion_lines(completion, width=console.width):
                console.print(line.rich_text(), soft_wrap=True)
        console.rule(style="bright_black")
        console.print(describe_summary(summary), soft_wrap=True, markup=False)
        if options.out is not None:
            console.print(f"saved to {options.out}", soft_wrap=True, markup=False)
    return ExitCode.SUCCESS if summary.valid else ExitCode.FAILURE


def play_settings(options: PlayOptions, folder: Path | None) -> Settings:
    """Return the settings of the episodes: the defaults of a run, and the overrides.

    Raises:
        SettingsError: an override names an unknown setting, or has an invalid value.
    """
    settings = settings_for_model(folder or _NO_MODEL, options.overrides)
    engine = settings.engine
    if folder is not None and not any(text.startswith("engine.max_model_len=") for text in options.overrides):
        length = min(max_positions(folder) or _PROMPT_TOKENS, _PROMPT_TOKENS + settings.rollout.max_tokens)
        engine = msgspec.structs.replace(engine, max_model_len=length)
    environment = EnvironmentSettings(ref=options.ref, args=dict(options.args))
    return msgspec.structs.replace(
        settings,
        engine=engine,
        environments={options.ref: environment},
        rewards=tuple(RewardSettings(ref=ref) for ref in options.rewards),
        rollout=msgspec.structs.replace(settings.rollout, group_size=options.count),
        data=msgspec.structs.replace(settings.data, path="-"),  # settings must have a path; no row is read from it
    )


async def sample_group(options: PlayOptions, settings: Settings, folder: Path | None) -> Group:
    """Play all episodes, and score them.

    Args:
        options: what to play.
        settings: from `play_settings`.
        folder: the policy's folder; None: the endpoint gets chat messages instead of token ids.
    """
    factory = await anyio.to_thread.run_sync(EnvironmentFactory.load, options.ref, options.args)
    if not options.fields:
        row = await anyio.to_thread.run_sync(first_row, factory, options.ref, _ROWS_TIMEOUT_S)
        options = msgspec.structs.replace(options, fields=row)
    prompt = make_prompt(options, settings.data.system)
    await try_reset(factory, prompt, settings.rollout.call_timeout_s, settings.sandboxes)
    if folder is None:
        if factory.runs_own_loop:
            raise SettingsError(
                f"{options.ref} runs its own agent loop, so its turns need an engine that Penstock can ask for tokens: "
                "give the model's folder with --policy"
            )
        tool_format = TOOL_FORMATS.get(settings.model.tool_format, TOOL_FORMATS["hermes"])
        timeout_s = settings.rollout.episode_timeout_s
        async with open_chat_endpoint(options.endpoint, options.model, tool_format, timeout_s) as endpoint:
            return await play_group(settings, endpoint, prompt)

    async def roll_out(url: str, version: int) -> Group:
        (group,) = await roll_out_and_score(settings, [url], folder, [prompt], min_policy_version=version)
        return group

    if options.endpoint:
        return await with_existing_engine(settings, options.endpoint, None, roll_out)
    return await with_started_engine(settings, folder, roll_out)


def make_prompt(options: PlayOptions, system: str = "") -> Prompt:
    """Return the prompt of the episodes, after a system message if one is given."""
    fields = dict(options.fields)
    text = options.prompt or fields.pop("prompt", "")
    messages: list[Message] = text if isinstance(text, list) else [{"role": "user", "content": text}]
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    return Prompt(
        id=f"play:0:{options.seed}",
        messages=messages,
        is_plain_text=isinstance(text, str) and bool(text),
        fields=fields,
        environment=options.ref,
        group_size=options.count,
        seed=options.seed,
    )


class RewardSummary(Struct, frozen=True, kw_only=True):
    """Rewards of one prompt's episodes, and how the episodes ended."""

    episodes: int
    valid: int
    """Episodes with a measured reward; `mean`, `std`, `min` and `max` are over them."""
    mean: float | None
    std: float | None
    """Standard deviation of the population."""
    min: float | None
    max: float | None
    ends: dict[str, int]
    """Number of episodes by how they ended: `finished`, a limit, or why they are invalid."""
    mean_turns: float
    tool_calls: int
    tool_errors: int


def summarize_rewards(group: Group) -> RewardSummary:
    """Summarize the completions of a group."""
    rewards = [c.reward.value for c in group.completions if isinstance(c.reward, Measured)]
    ends = Counter[str]()
    for completion in group.completions:
        if completion.failure is not None:
            ends[f"invalid ({completion.failure.reason})"] += 1
        elif isinstance(completion.reward, Unmeasured):
            ends[f"invalid ({completion.reward.reason})"] += 1
        else:
            ends[str(completion.truncated or "finished")] += 1
    return RewardSummary(
        episodes=len(group.completions),
        valid=len(rewards),
        mean=statistics.fmean(rewards) if rewards else None,
        std=statistics.pstdev(rewards) if rewards else None,
        min=min(rewards, default=None),
        max=max(rewards, default=None),
        ends=dict(ends.most_common()),
        mean_turns=statistics.fmean(completion.turns for completion in group.completions),
        tool_calls=sum(completion.tool_calls for completion in group.completions),
        tool_errors=sum(completion.tool_errors for completion in group.completions),
    )


def describe_summary(summary: RewardSummary) -> str:
    """Return the summary as lines of text, and what equal rewards mean."""
    ends = ", ".join(f"{count} {end}" for end, count in summary.ends.items())
    calls = f"{summary.tool_calls} tool calls, {summary.tool_errors} tool errors"
    text = f"{summary.episodes} episodes: {ends}; {summary.mean_turns:.1f} turns on average, {calls}\n"
    if summary.mean is None:
        return f"{text}reward: none was measured; each episode above says why"
    spread = f"standard deviation {summary.std:.3f}, from {summary.min:g} to {summary.max:g}"
    text += f"reward: mean {summary.mean:.3f}, {spread}, over {summary.valid} of {summary.episodes} episodes"
    if summary.std == 0 and summary.valid > 1:
        text += "\nAll rewards are equal: a group like this one teaches a policy nothing."
    return text

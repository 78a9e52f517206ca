"""Tries an agent program: what it asks the endpoint for, and whether its reward command measures anything."""

from collections.abc import Mapping
from typing import Any, Final

from envs.factory import EnvironmentFactory
from envs.programs.agent_program import PORT, AgentProgram, MeasuredAgentProgram
from envs.references import AGENTS
from envs.snapshot import thaw
from stream.errors import EnvironmentFailure
from stream.records import Completion, Prompt
from workers.check.report import ProgramTrial, Subject
from workers.rollout.agent_endpoint.fields import FieldUse
from workers.rollout.agent_endpoint.request_log import RequestLog
from workers.rollout.agent_endpoint.role_rules import find_role_rules
from workers.rollout.chat.chat_setup import ChatSetup

_PROXY: Final = {"HTTPS_PROXY": f"http://127.0.0.1:{PORT}", "NO_PROXY": "127.0.0.1,localhost"}
"""With these a program says where it wants to go; without, the sandbox refuses it unseen."""
_LAST_WORDS: Final = 500


def watched_arguments(ref: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an environment with which a program tells its connections elsewhere."""
    if ref not in AGENTS or args.get("network", "endpoint") != "endpoint":
        return dict(args)
    return {**args, "env": _PROXY | dict(args.get("env", {}))}


def is_program(factory: EnvironmentFactory) -> bool:
    """Return whether an environment starts a program."""
    return issubclass(factory.environment_class, AgentProgram)


def describe_program(
    subject: Subject, seen: RequestLog, completion: Completion, factory: Any, setup: ChatSetup | None
) -> ProgramTrial:
    """Return what a program asked for in an episode, and warn of what a run would suffer from.

    Args:
        subject: the environment, in findings.
        seen: the program's requests.
        completion: of the episode.
        factory: of the environment.
        setup: the chat of the run's model; None if there is none.
    """
    refused = [f"{each.route}: {each.error}" for each in seen.refused]
    trial = ProgramTrial(
        routes=dict(seen.routes),
        first_s=seen.first_s,
        refused=list(dict.fromkeys(refused)),
        ignored=seen.fields(FieldUse.IGNORED),
        unknown=seen.fields(None),
        turns=completion.turns,
        rows=[len(row.prompt) + len(row.tokens) for row in completion.rows],
        has_model=setup is not None,
    )
    if setup is not None:
        rules = find_role_rules(setup.chat)
        roles = [case for request in seen.requests for case in rules.not_taken(request.roles)]
        trial.roles = list(dict.fromkeys(roles))
    if completion.snapshot is not None:
        program: Any = thaw(completion.snapshot, factory)
        trial.elsewhere, trial.exit_code = sorted(set(program.elsewhere)), program.exit_code
    for each in trial.refused:
        subject.warn(f"the endpoint refused a request: {each}")
    if trial.unknown:
        subject.warn(f"fields that no table knows are ignored: {', '.join(trial.unknown)}")
    if len(trial.rows) > max(1, trial.turns // 2):
        subject.warn(
            f"{trial.turns} turns made {len(trial.rows)} rows: the program rewrites its history, so that contexts are "
            "trained again and again",
            "turn off what it rewrites, or use a chat template that keeps earlier turns",
        )
    return trial


async def measure_untouched(subject: Subject, factory: EnvironmentFactory, prompt: Prompt) -> float | None:
    """Run the reward's command in the folder as it is; warns if it writes no number."""
    program = factory.make()
    if not isinstance(program, MeasuredAgentProgram):
        return None
    try:
        await program.reset(**prompt.fields, seed=prompt.seed)
        number, printed = await program.measure()
    except EnvironmentFailure as error:
        subject.error(f"the reward's command: {error}")
        return None
    finally:
        await program.close()
    if number is None:
        said = printed.strip()[-_LAST_WORDS:] or "nothing"
        subject.warn(
            f"the reward's command printed no number in the untouched folder, which measures "
            f"{program.reward_command.worst:g} (worst); the end of what it wrote: {said}",
            "let its last line be a number whatever it finds, also where the program did nothing",
        )
    return number

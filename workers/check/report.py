"""The report of a check as values: its findings, and what was tried; and the collector of both while a check is on."""

import time
from typing import Any, Final, Literal

from msgspec import Struct

from stream.causes import ErrorCause
from stream.records import Message, RewardPart
from stream.validity import Reward
from workers.settings import Settings

Level = Literal["error", "warning"]
TargetKind = Literal["environment", "reward function", "settings file"]

_LOAD_TIMEOUT_S: Final = 20.0
"""In the check of a run: what takes longer is not tried further; the run waits for it."""
_CALL_TIMEOUT_S: Final = 10.0
_PATIENT_LOAD_TIMEOUT_S: Final = 120.0


class CheckFinding(Struct, frozen=True, kw_only=True):
    """One fault: what is wrong, where, and what to do about it."""

    level: Level
    """`error`: it cannot work; `warning`: it works, but probably not as meant."""
    subject: str
    """What is wrong: `model`, `reward exact`, `environment counter`."""
    place: str
    """A key of the settings, and file and line in the user's code; empty: the whole subject."""
    message: str
    """What is wrong with it."""
    remedy: str = ""
    """What to do; empty: the message says it."""
    cause: ErrorCause | None = None
    """The exception, if user code raised one."""

    @property
    def text(self) -> str:
        """Message and remedy."""
        return f"{self.message}; {self.remedy}" if self.remedy else self.message

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"{self.level}: {self.subject}{place}: {self.text}"


class ToolTrial(Struct, kw_only=True):
    """One call of a tool."""

    name: str
    description: str
    schema: dict[str, Any]
    arguments: dict[str, Any]
    """As given, or samples generated from the schema."""
    reply: str = ""
    """The text that a model would read."""
    is_error: bool = False
    """The reply is an error message for the model; the episode continues."""
    failure: str = ""
    """Reason why the call failed the episode and made the completion invalid; empty: it did not."""
    returned: str = ""
    """What the result is if it is not text: types of content parts, or the type of an object."""
    ends: bool = False
    """The episode was over after it (`done`)."""


class TurnTrial(Struct, kw_only=True):
    """One turn without a tool call: what was said, and what the environment answered."""

    said: str
    reply: str = ""
    """What `respond` returned; empty if there is no such method, or it ended the episode."""
    failure: str = ""
    """Why the completion is invalid; empty: it is not."""
    ends: bool = False
    """The episode was over after it."""


class ProgramTrial(Struct, kw_only=True):
    """What an agent program asked the endpoint for, with a scripted model."""

    routes: dict[str, int]
    """Requests by route."""
    first_s: float | None
    """Seconds until the first request; None if there was none."""
    refused: list[str] = []
    """Requests that got an error, each with the reason."""
    ignored: list[str] = []
    """Fields without effect, as `dialect.field`."""
    unknown: list[str] = []
    """Fields that no table knows, likewise."""
    roles: list[str] = []
    """Roles that the chat template does not take where the program sends them, for example `system after user`."""
    elsewhere: list[str] = []
    """Hosts that it wanted to reach; only those that it asks through a proxy can be seen."""
    turns: int = 0
    rows: list[int] = []
    """Length of each row, prompt included: in tokens of the run's model, or in bytes if there is none."""
    has_model: bool = False
    """The run's tokenizer and chat template were used."""
    exit_code: int | None = None
    untouched_reward: float | None = None
    """What the reward's command measures in the folder as it is; None if there is no command, or no number."""


class EnvironmentTrial(Struct, kw_only=True):
    """What an environment did in one episode."""

    environment: str
    """Class of the environment as `module:qualname`."""
    reference_kind: str
    fields: dict[str, Any] = {}
    """Columns of the row with which it was reset."""
    observation: Any = None
    """The return value of `reset`."""
    tools: list[ToolTrial] = []
    """Calls in order; at least one for each tool, unless calls were given."""
    turns: list[TurnTrial] = []
    """Turns without a call, in order."""
    messages: list[Message] = []
    """The conversation after the prompt."""
    parts: list[RewardPart] = []
    reward: Reward | None = None
    """The merged reward parts; None if the environment has no `get_reward`."""
    no_step_reward: Reward | None = None
    """The reward of an episode without a tool call, likewise."""
    sampled_rewards: list[float] = []
    """Rewards of random steps, where the environment can take some."""
    snapshot_bytes: int | None = None
    omitted: dict[str, str] = {}
    """Attributes that are missing from the snapshot, with the reason."""
    rendered: str = ""
    """What `render` returned for the snapshot; empty without such a method."""
    program: ProgramTrial | None = None
    """Set for an agent program."""


class SampleReward(Struct, kw_only=True):
    """What a reward function returned for one sample completion."""

    input_format: Literal["text", "messages"]
    """`text`: prompt and completion are strings; `messages`: both are conversations."""
    completion: str
    reward: Reward


class RewardTrial(Struct, kw_only=True):
    """What a reward function did with sample completions."""

    name: str
    """Name of the reward part."""
    reference_kind: str
    parameters: list[str]
    """Names of the function's parameters."""
    is_async: bool
    samples: list[SampleReward] = []


class CheckReport(Struct, frozen=True, kw_only=True):
    """What a check found out; printing it shows everything, shortened."""

    target: str
    """The reference or the settings file."""
    kind: TargetKind
    ok: bool
    """Whether it can work, possibly with warnings."""
    findings: tuple[CheckFinding, ...]
    """Errors first."""
    checked: tuple[str, ...] = ()
    """What was checked, in words."""
    environments: dict[str, EnvironmentTrial] = {}
    """What each environment did that could be made, by its name in the settings or its reference."""
    rewards: dict[str, RewardTrial] = {}
    """What each reward function did that could be loaded, likewise."""
    seconds: float = 0.0

    @property
    def errors(self) -> list[CheckFinding]:
        """Faults with which it cannot work."""
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def warnings(self) -> list[CheckFinding]:
        """Faults with which it works, but probably not as meant."""
        return [finding for finding in self.findings if finding.level == "warning"]

    def __str__(self) -> str:
        from workers.check.report_text import report_text

        return report_text(self)

    def _repr_html_(self) -> str:
        from workers.check.report_text import report_html

        return report_html(self)


class Checker:
    """Collects what one check finds out.

    Args:
        settings: of the run, or those under which a reference is tried.
        is_alone: a reference is tried alone: it is waited for as long as a run would, all of its tools are called, and
            what cannot be tried is an error. In the check of a run, what cannot be tried now is a warning.
    """

    def __init__(self, settings: Settings, *, is_alone: bool = False) -> None:
        self.settings = settings
        self.is_alone = is_alone
        self.checked: list[str] = []
        self.environments: dict[str, EnvironmentTrial] = {}
        self.rewards: dict[str, RewardTrial] = {}
        self.findings: list[CheckFinding] = []
        self._began = time.monotonic()
        call_timeout_s = settings.rollout.call_timeout_s
        self.load_timeout_s = _PATIENT_LOAD_TIMEOUT_S if is_alone else _LOAD_TIMEOUT_S
        """For importing and making what a reference names."""
        self.call_timeout_s = call_timeout_s if is_alone else min(_CALL_TIMEOUT_S, call_timeout_s)
        """For one call of user code."""

    def about(self, name: str, place: str = "") -> "Subject":
        """Return a subject of findings, which are at this place unless they name another one."""
        return Subject(self, name, place)

    def report(self, target: str, kind: TargetKind) -> CheckReport:
        """Return the report."""
        findings = sorted(self.findings, key=lambda finding: finding.level)  # "error" comes before "warning"
        return CheckReport(
            target=target,
            kind=kind,
            ok=not findings or findings[0].level != "error",
            findings=tuple(findings),
            checked=tuple(self.checked),
            environments=self.environments,
            rewards=self.rewards,
            seconds=round(time.monotonic() - self._began, 2),
        )


class Subject(Struct, frozen=True):
    """Something that is tried; adds the findings about it."""

    checker: Checker
    name: str
    place: str

    def error(self, message: object, remedy: str = "", cause: ErrorCause | None = None) -> None:
        """Add a fault with which it cannot work."""
        self.add("error", message, remedy, cause)

    def warn(self, message: object, remedy: str = "", cause: ErrorCause | None = None) -> None:
        """Add a fault with which it works, but probably not as meant."""
        self.add("warning", message, remedy, cause)

    def error_if_alone(self, message: object) -> None:
        """Add an error, or in the check of a run a warning, since the run may do better."""
        self.add("error" if self.checker.is_alone else "warning", message)

    def add(self, level: Level, message: object, remedy: str = "", cause: ErrorCause | None = None) -> None:
        """Add a finding, unless it is there already."""
        places = [self.place, cause.place if cause is not None else ""]
        finding = CheckFinding(
            level=level,
            subject=self.name,
            place=", ".join(filter(None, places)),
            message=str(message),
            remedy=remedy,
            cause=cause,
        )
        if finding not in self.checker.findings:
            self.checker.findings.append(finding)

"""The house rules that a program can check: sizes of functions, retired words, the glossary, the length of pages.

`make check` runs this file.
"""

import ast
import functools
import importlib
import re
import runpy
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.settings import sections

ROOT = Path(__file__).parents[2]
PRODUCT = ("penstock", "stream", "envs", "workers", "plugins")
MAX_LINES, MAX_PARAMETERS, MAX_TERMS = 60, 8, 35
MIN_FILE_LINES, MAX_FILE_LINES = 60, 400
MAX_PAGE_LINES = {"README.md": 120, "ARCHITECTURE.md": 135}
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")

RETIRED_NAMES = frozenset(
    """
    Agreement Beat Book Caller Carrier Census Described Died Doorstep Drawn Either End Endings EngineWord Facts Fence
    Finish Formed Gauge Grant Guard Hand Harness HeldLoop HeldOut How InFlight Journal Judgement KnownEngine Letter Link
    Live Lookout LostThreads Lull Mail MisfitError Mixture NoFormError Nodes Orders Overran Overtaking Pace Places
    PutBack Raised Returned Roll Room Roster RunView Said Seat Signals SilentError Spoken Stragglers Survey Taken Tally
    Tenure Trajectories UnfitError Wanted Way Wear Word Written
    NONE_YET WORN_OUT annotate annotations at_least believed bury confine continuity cooled disown drives_itself enlist
    junk keep_finished left_out likeliest lost_threads no_loss overtake overtaking own_rows patiently put_down run_aside
    settle steer tally timed untrained_ends verdicts
    """.split()  # noqa: SIM905  (a list of words)
)
"""Names of classes, functions, parameters and fields that standard terms have replaced."""
RETIRED_MODULES = frozenset(
    """
    agreement annotations aside book books catalogue census confine ends endings engine_word fence forming guard hand
    held_loop held_out journal keeping known_engine last_words led live lookout lull mixture no_loss_monitor overtaking
    patience places pump roll room roster spoken steering stragglers survey tally tenure untrained_ends wear
    """.split()  # noqa: SIM905  (a list of words)
)
RETIRED_EVENTS = re.compile(
    r"\b(\w+\.awaited|work\.came|(engine|redis|trainer)\.returned|entry\.buried|role\.(worn_out|renewed)|loop\.held|"
    r"engine\.(left_behind|unmetered)|\w+\.forgotten|server\.forgetful|checkpoint\.passed_over|evaluation\.overtaken)\b"
)
RETIRED_KEYS = re.compile(
    r"(?<![\w./])("
    + "|".join(
        """
        data.mix data.name data.environment data.tool_schemas data.template_args data.backlog rewards.where rewards.each
        rewards.concurrency rewards.per_second rollout.stop rollout.top_p rollout.top_k rollout.min_p rollout.min_tokens
        rollout.logit_bias rollout.restricted rollout.wall_clock_s rollout.reset_timeout_s rollout.tool_timeout_s
        rollout.reward_timeout_s rollout.max_tool_errors rollout.endpoint_host rollout.partial score.groups_in_flight
        eval.share eval.hold_s eval.publish_wait_s engine.dns engine.threads engine.min_concurrency
        engine.max_concurrency engine.attempts engine.max_attempts engine.max_batch engine.max_length
        train.groups_per_step train.betas train.threads train.checkpoint_every train.keep_last lora.targets lora.publish
        weights.kv weights.host weights.port weights.timeout_s algorithm.aggregation_constant algorithm.kl_divergence
        algorithm.correct_at algorithm.reward_bias algorithm.reward_scale algorithm.singleton filter.min_mean_reward
        filter.max_mean_reward filter.min_advantage filter.max_advantage shaping.bias shaping.scale shaping.clip
        shaping.overlong_tokens shaping.overlong_penalty correction.lower correction.upper correction.outside
        correction.normalize critic.width critic.learning_rate critic.value_clip pacing.late pacing.straggler_timeout_s
        archive.annotations archive.megabytes delivery.lease_s delivery.infra_attempts delivery.data_attempts
        delivery.backoff_s delivery.reconnect_s delivery.grace_s delivery.lost_threads delivery.memory_mb
        delivery.restarts queue.max_restarts delivery.fsync queue.max_abandoned_threads guard.max_invalid_fraction
        guard.window_groups guard.stall_s
        """.replace(".", r"\.").split()
    )
    + r"|penstock estimators)(?![\w(])"
)
RETIRED_PHRASES = re.compile(
    r"\b(whoever|somebody|told|so many|what becomes of|such a one|those of these|tells of|"
    r"comes? along|hangs on|is not asked|nobody is asked|in hand)\b",
    re.IGNORECASE,
)


@functools.cache
def tracked() -> tuple[Path, ...]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return tuple(ROOT / name for name in names if name and (ROOT / name).is_file())


def product_files() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PRODUCT]


def pages() -> list[Path]:
    docs = [path for path in tracked() if path.suffix == ".md" and path.relative_to(ROOT).parts[0] == "docs"]
    return [*docs, *(ROOT / name for name in PAGES)]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    given = function.args
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [one for one in found if one.arg not in ("self", "cls")]


def is_any_dict(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("dict[str, Any]", "Mapping[str, Any]")


def test_no_function_is_longer_than_60_lines():
    long = [
        f"{place(path, function)} {function.name}: {lines} lines"
        for path in product_files()
        for function in functions(path)
        if (lines := function.end_lineno - function.lineno + 1) > MAX_LINES
    ]
    assert not long, "\n".join(long)


def test_no_function_has_more_than_8_parameters():
    wide = [
        f"{place(path, function)} {function.name}: {count} parameters"
        for path in product_files()
        for function in functions(path)
        if (count := len(parameters(function))) > MAX_PARAMETERS
    ]
    assert not wide, "\n".join(wide)


SHORT_FILES = frozenset(
    """
    envs/builtin/guess.py penstock/__main__.py penstock/testing.py penstock/trainer.py
    plugins/vllm/penstock_vllm/errors.py plugins/vllm/penstock_vllm/tensor_probe.py
    plugins/vllm/penstock_vllm/vllm_internals.py stream/connection/keys.py stream/connection/scripts.py
    stream/parent_death.py stream/trainer/leased_group.py stream/trainer/ledger_ends.py
    workers/dashboard/evaluations_page.py workers/demo/new_project.py workers/role/exit_codes.py
    workers/settings/secrets.py workers/terminal/engines.py
    workers/terminal/groups.py workers/terminal/output.py workers/train/algorithms/pass_at_k.py
    workers/train/algorithms/proximal.py workers/train/model/policy_folder.py
    workers/train/checkpointing/markdown.py
    """.split()  # noqa: SIM905  (a list of words)
)
"""Files below the smallest size that are a noun of their own all the same."""


def test_a_file_holds_one_noun_whole():
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in product_files()
        if path.name != "__init__.py" and path.parent.name != "project"  # that is what a user starts with
    }
    assert not {path: count for path, count in lines.items() if count > MAX_FILE_LINES}, "a file holds two nouns"
    short = {path for path, count in lines.items() if count < MIN_FILE_LINES}
    assert not short - SHORT_FILES, "what is that short belongs to the noun that it serves"
    assert not SHORT_FILES - short, "no longer short, or gone"


def test_no_package_lists_its_files():
    tables = [
        str(path.relative_to(ROOT))
        for path in product_files()
        if path.name == "__init__.py"
        if len(re.findall(r"^`?[a-z_]+\.py`?\s", ast.get_docstring(parsed(path)) or "", re.MULTILINE)) > 1
    ]
    assert not tables, "a table of files goes stale; a sentence and a picture do not"


RELAYS = {
    "stream/connection/address.py": "options of redis-py's connection",
    "tests/base_models/small_model.py": "sizes of a transformers configuration",
    "workers/local_engine/weights.py": "options of transformers' from_pretrained",
    "workers/local_engine/pooling/classifier.py": "options of transformers' apply_chat_template",
    "workers/rollout/tool_result.py": "arguments of a user's tool",
    "workers/hub/downloads.py": "options of huggingface_hub's snapshot_download",
    "workers/train/model/sharded_model.py": "arguments of torch's forward",
}
"""Files that pass arguments of any type to third-party code."""


def relayed_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of `**more: Any`, and of locals declared as `dict[str, Any]`."""
    extra = function.args.kwarg
    is_any = extra is not None and extra.annotation is not None and ast.unparse(extra.annotation) == "Any"
    declared = {
        node.target.id
        for node in ast.walk(function)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_any_dict(node.annotation)
    }
    return declared | ({extra.arg} if is_any else set())


def test_no_function_relays_arguments_of_any_type():
    relays = {
        f"{place(path, node)} {function.name}: **{keyword.value.id}"
        for path in product_files()
        if str(path.relative_to(ROOT)) not in RELAYS
        for function in functions(path)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id in relayed_names(function)
    }
    assert not relays, "\n".join(sorted(relays))
    assert all((ROOT / path).is_file() for path in RELAYS)


def defined_names(path: Path) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.arg):
            yield node.arg, node
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def test_no_retired_word_is_an_identifier_or_a_module():
    found = [
        f"{place(path, node)} {name}"
        for path in product_files()
        for name, node in defined_names(path)
        if name.lstrip("_") in RETIRED_NAMES
    ]
    found += [str(path.relative_to(ROOT)) for path in product_files() if path.stem.lstrip("_") in RETIRED_MODULES]
    assert not found, "\n".join(found)


def strings(path: Path) -> Iterator[tuple[str, ast.Constant]]:
    """Return all strings of a file: docstrings, messages, log events."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node


@pytest.mark.parametrize(
    "retired", [RETIRED_EVENTS, RETIRED_KEYS, RETIRED_PHRASES], ids=["log events", "settings", "phrases"]
)
def test_no_retired_word_stands_in_a_message_or_on_a_page(retired):
    found = [
        f"{place(path, node)} {match[0]}"
        for path in product_files()
        for text, node in strings(path)
        for match in retired.finditer(text)
    ]
    found += [
        f"{path.relative_to(ROOT)}:{number} {match[0]}"
        for path in pages()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in retired.finditer(line)
    ]
    assert not found, "\n".join(found)


def test_damaged_utf8_is_expected_wherever_json_is_decoded():
    """msgspec raises UnicodeDecodeError for it, which is a ValueError as its DecodeError is, and not a DecodeError."""
    narrow = re.compile(r"(except|suppress\().*\bmsgspec\.(DecodeError|MsgspecError)\b(?!.*ValueError)")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in product_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if narrow.search(line)
    ]
    assert found == []


def test_every_log_event_is_in_the_reference():
    page = (ROOT / "docs" / "log-events.md").read_text()
    events = {call.event for call in runpy.run_path(str(ROOT / "docs" / "log_events_page.py"))["log_calls"]()}
    assert len(events) > 100
    missing = sorted(event for event in events if f"| `{event}` |" not in page)
    assert not missing, f"give {missing} a meaning in docs/log_events_page.py, then run `make reference`"


def toml_tables() -> list[tuple[str, str, object]]:
    """Return location, section and value of each table of a page's TOML blocks that is a section of the settings."""
    blocks = [
        (f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}", tomllib.loads(match[1]))
        for path in [*pages(), *(path for path in tracked() if path.match("examples/*/README.md"))]
        for text in [path.read_text()]
        for match in re.finditer(r"```toml\n(.*?)```", text, re.DOTALL)
    ]
    return [(where, name, table) for where, block in blocks for name, table in block.items()]


@pytest.mark.parametrize(("where", "section", "table"), toml_tables(), ids=lambda value: str(value)[:40])
def test_settings_on_pages_have_keys_that_exist(where, section, table):
    kinds = sections()[section]
    for one in table if isinstance(table, list) else [table]:
        keys = {field for kind in kinds for field in kind.__struct_fields__} | ({"name"} if len(kinds) > 1 else set())
        assert not kinds or set(one) <= keys, f"{where}: [{section}] {set(one) - keys}"


def glossary() -> list[tuple[str, str]]:
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| `([\w.]+)` \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE
    )
    assert rows
    return rows


def test_the_glossary_has_at_most_35_terms_in_one_sentence_each():
    assert len(glossary()) <= MAX_TERMS
    lines = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len(lines) == len(glossary()) + 1, "a row of the glossary has no type"


@pytest.mark.parametrize(("term", "name"), glossary(), ids=lambda value: value)
def test_every_type_of_the_glossary_exists(term, name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute), f"{term}: {name}"


@pytest.mark.parametrize(("page", "limit"), MAX_PAGE_LINES.items())
def test_pages_stay_short(page, limit):
    assert len((ROOT / page).read_text().splitlines()) <= limit


def test_every_path_in_the_architecture_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`((?:stream|envs|workers|plugins|tests|docs|benchmarks|examples)/[\w./-]*)`", text))
    assert named
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing, "\n".join(missing)

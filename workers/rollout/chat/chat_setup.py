"""Load the chat tokenizer and the tool-call format of each environment, and check both when a worker starts.

`open_model_folder` yields the folder with these files: `model.path`, or, on a machine that does not have it, a copy of
the files that the trainer uploaded.
"""

import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import structlog

from envs.factory import EnvironmentFactory
from stream.connection.model_files import download_model_files
from stream.errors import SettingsError
from workers.role.context import WorkerContext
from workers.role.work_loop import wait_for_trainer
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.format_detection import choose_tool_format
from workers.rollout.tool_formats.parsing import ToolFormat
from workers.settings import Settings

log = structlog.get_logger()


class ChatSetup(NamedTuple):
    """How one model converses with one environment."""

    chat: ChatTokenizer
    tool_format: ToolFormat


def load_chat_setups(
    settings: Settings, model_path: Path, factories: Mapping[str, EnvironmentFactory]
) -> dict[str | None, ChatSetup]:
    """Return the chat setup of each environment, by name; without environments, one setup under None. Blocks.

    Environments do not share a setup, because the tools of an environment are part of its prompt. If there are tools,
    the log says which format was chosen, and whether a conversation continues in one row or the template rewrites
    history, each with the reason.

    Raises:
        PenstockError: the folder holds no model with a chat template, or the template ignores tool messages.
        SettingsError: `model.tool_format` is `auto`, and the template does not show how the model calls a tool.
    """
    if not factories:
        return {None: _without_tools(settings, model_path)}
    return {name: _for_environment(name, factory, settings, model_path) for name, factory in factories.items()}


def _for_environment(name: str, factory: EnvironmentFactory, settings: Settings, model_path: Path) -> ChatSetup:
    if factory.runs_own_loop:
        return _for_own_loop(settings, model_path)
    if not factory.tools and not factory.responds:  # single-turn: nothing is parsed, and no conversation continues
        return _without_tools(settings, model_path)
    schemas = [tool.schema for tool in factory.tools]
    shown_schemas = (schemas or None) if settings.data.chat_template_kwargs.get("tools", True) else None
    chat = ChatTokenizer.load(model_path, template_kwargs(settings), shown_schemas)
    choice = choose_tool_format(
        settings.model.tool_format if schemas else "hermes", chat.renderer.template, shown_schemas
    )
    history = chat.check_history(with_tools=bool(schemas), with_user_replies=factory.responds)
    prompt = chat.renderer.render_prompt([{"role": "user", "content": "u"}]) if shown_schemas else ""
    if shown_schemas and not all(tool.name in prompt for tool in factory.tools):
        log.warning(
            "template.tools_not_rendered",
            environment=name,
            why="the chat template leaves out the tools' schemas: describe the tools to the model in data.system",
        )
    log.info(
        "template.inspected",
        environment=name,
        tool_format=choice.name,
        tool_format_why=choice.reason,
        history="fork" if history.rewrites_history else "continue",
        history_why=history.reason,
    )
    return ChatSetup(chat, choice.format)


def _without_tools(settings: Settings, model_path: Path) -> ChatSetup:
    chat = ChatTokenizer.load(model_path, template_kwargs(settings), None)
    return ChatSetup(chat, choose_tool_format("hermes", chat.renderer.template, None).format)


def _for_own_loop(settings: Settings, model_path: Path) -> ChatSetup:
    """Load the setup of an environment that runs its own agent loop: its tools are unknown until it names them."""
    chat = ChatTokenizer.load(model_path, template_kwargs(settings), None)
    chat.shows_tools = bool(settings.data.chat_template_kwargs.get("tools", True))
    try:
        return ChatSetup(chat, choose_tool_format(settings.model.tool_format, chat.renderer.template, None).format)
    except SettingsError as error:  # only a request with tools would need a format
        log.warning("template.tool_format_unknown", why=str(error))
        return _without_tools(settings, model_path)


def template_kwargs(settings: Settings) -> dict[str, Any]:
    """Return the extra arguments of the chat template; not among them is `tools`, which only switches schemas on."""
    return {name: value for name, value in settings.data.chat_template_kwargs.items() if name != "tools"}


@asynccontextmanager
async def open_model_folder(context: WorkerContext) -> AsyncIterator[Path]:
    """Yield `model.path`; if this machine has no such folder, a temporary one with the files that the trainer uploaded.

    Raises:
        RunFailedError: no trainer has started within `abort.stall_timeout_s`.
        RecordError: a file on the server is not the one that the trainer uploaded.
    """
    path = context.settings.model.folder
    if await anyio.to_thread.run_sync(os.path.isdir, path):
        yield path
        return

    async def download() -> Mapping[str, bytes] | None:
        return await download_model_files(context.connection) or None

    files = await wait_for_trainer(
        context, download, f"model.path = {str(path)!r} is not on this machine, so its tokenizer comes from the trainer"
    )
    with tempfile.TemporaryDirectory(prefix="penstock-model-") as temporary:
        folder = Path(temporary, path.name)  # messages about the chat template name the folder
        await anyio.to_thread.run_sync(_write, folder, files)
        log.info("model.downloaded", files=sorted(files), bytes=sum(map(len, files.values())))
        yield folder


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)

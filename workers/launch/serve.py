"""The process of `penstock serve`: chooses the server for a model and runs it until stopped."""

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio

from stream.errors import PenstockError, SettingsError
from workers.hub.names import MODEL_SECTION, find_model, known_values, print_note, resolve_names
from workers.launch.process import limit_drain, report_error, run_to_exit_code, watch_signals
from workers.role.exit_codes import ExitCode
from workers.role.log_setup import configure_logging
from workers.role.memory import engine_cache_bytes
from workers.settings import Settings
from workers.settings.cross_checks import ENGINE_CHECKS
from workers.settings.toml_file import load_settings, settings_for_model

if TYPE_CHECKING:
    from aiohttp import web

Runner = Literal["auto", "generate", "pooling"]
"""`generate` serves tokens, `pooling` the scores of a sequence classifier; `auto` follows the model's configuration."""


def run_engine(
    target: Path, host: str, port: int, overrides: tuple[str, ...], runner: Runner = "auto", dtype: str = ""
) -> ExitCode:
    """Serve the model of a settings file, or of a model folder. Returns the exit code.

    Prints `listening on URL` once the server answers; the supervisor waits for that line.

    Args:
        target: settings file or model folder.
        host: address to listen on.
        port: port to listen on; 0: any free port.
        overrides: values of single settings, as `--set` takes them; they take precedence over the file.
        runner: whether to serve tokens or scores.
        dtype: data type of the weights; default: `model.dtype` of the settings.
    """
    configure_logging("serve")
    try:
        serve = choose_server(target, overrides, runner, dtype, host)
    except SettingsError as error:
        return report_error(error, ExitCode.USAGE)
    except PenstockError as error:
        return report_error(error)

    async def main() -> ExitCode:
        stopping = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_signals, stopping, tasks.cancel_scope)
            tasks.start_soon(limit_drain, stopping, 0.0, tasks.cancel_scope)
            await serve(
                port=port,
                ready=lambda url: print(f"listening on {url}", flush=True),  # noqa: T201
            )
            tasks.cancel_scope.cancel()
        return ExitCode.SUCCESS

    return run_to_exit_code(main)


def choose_server(
    target: Path, overrides: tuple[str, ...], runner: Runner, dtype: str, host: str
) -> Callable[..., Awaitable[None]]:
    """Return the coroutine function that serves a model; it takes `port` and `ready`.

    Args:
        target: settings file, model folder, or name of a model on the hub.
        overrides: values of single settings; they take precedence over the file.
        runner: whether to serve tokens or scores.
        dtype: data type of the weights; default: `model.dtype` of the settings.
        host: address to listen on.

    Raises:
        SettingsError: the engine that the settings name cannot serve this model.
        PenstockError: the model cannot be downloaded.
    """
    target = find_model(str(target), print_note)
    if target.is_dir():
        settings = settings_for_model(target, overrides)
    else:
        settings = load_settings(target, overrides, ENGINE_CHECKS)
        settings = resolve_names(settings, known_values(settings), print_note, (MODEL_SECTION,))
    if settings.engine.server == "vllm":
        if runner == "pooling":
            raise SettingsError("--runner pooling is for the local engine; start vLLM yourself (docs/reward-models.md)")
        from workers.vllm.process import serve_vllm

        return partial(serve_vllm, settings, host=host)
    from workers.local_engine.pooling.classifier import is_classifier

    model, dtype, engine = settings.model.folder, dtype or settings.model.dtype, settings.engine
    if runner == "pooling" or (runner == "auto" and is_classifier(model)):
        from workers.engine_api.http_access import AccessRules
        from workers.local_engine.pooling.pooling_server import serve_pooling

        # A reward model uses all its positions, unless the settings limit the length.
        return partial(
            serve_pooling,
            model,
            access=AccessRules(host=host, names=settings.engine.hosts),
            max_length=engine.max_model_len,
            threads=settings.run.threads,
            dtype=dtype,
        )
    return _policy_server(target, settings, dtype, host)


def _policy_server(target: Path, settings: Settings, dtype: str, host: str) -> Callable[..., Awaitable[None]]:
    """Return what serves a policy by the local engine: the arguments are those of `choose_server`."""
    from workers.launch.chat_api.routes import ChatRoutes
    from workers.local_engine.local_server import EngineLimits, EngineRoutes, serve_local_engine
    from workers.local_engine.weights import EngineAccess

    def chat_routes(engine: EngineRoutes) -> "Iterable[web.RouteDef]":
        return ChatRoutes(settings, engine).routes()

    return partial(
        serve_local_engine,
        settings.model.folder,
        access=EngineAccess(
            host=host,
            names=settings.engine.hosts,
            weight_folders=() if target.is_dir() or not settings.run.name else (settings.folder,),
        ),
        limits=EngineLimits(
            settings.engine.max_batch_size,
            settings.max_model_len,
            engine_cache_bytes(settings.engine.max_cache_bytes),
        ),
        threads=settings.run.threads,
        dtype=dtype,
        more_routes=chat_routes,
    )

"""Which server serves a model: vLLM, the local engine, or the one for sequence classifiers."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from stream.errors import SettingsError
from workers.settings.toml_file import load_settings, settings_for_model


def choose_server(target: Path, overrides: tuple[str, ...], runner: str, dtype: str) -> Callable[..., Awaitable[None]]:
    """The coroutine function that serves a model; takes `host`, `port` and `ready`.

    Args:
        target: a settings file, or a model's folder.
        overrides: of single settings, the file's or the defaults'.
        runner: `generate`, `pooling`, or `auto`: what the model's configuration says it is for.
        dtype: of the weights; `model.dtype` unless given.

    Raises:
        SettingsError: the engine that the settings name cannot serve it.
    """
    settings = settings_for_model(target, overrides) if target.is_dir() else load_settings(target, overrides)
    if settings.engine.server == "vllm":
        if runner == "pooling":
            raise SettingsError("--runner pooling is the local engine's; start vLLM by itself (docs/reward-models.md)")
        from workers.vllm.server import serve_vllm

        return partial(serve_vllm, settings)
    from workers.local_engine.pooling.classifier import is_classifier

    model, dtype, engine = Path(settings.model.path), dtype or settings.model.dtype, settings.engine
    if runner == "pooling" or (runner == "auto" and is_classifier(model)):
        from workers.local_engine.pooling.server import serve_pooling

        # A reward model reads what its positions allow, unless somebody says otherwise.
        said = not target.is_dir() or any(override.startswith("engine.max_model_len=") for override in overrides)
        length = engine.max_model_len if said else 0
        return partial(serve_pooling, model, max_length=length, threads=settings.run.threads, dtype=dtype)
    if settings.publishes_adapters:
        raise SettingsError(
            f"{target}: weights.transport is 'adapter', but the local engine does not support adapters; set it to "
            "'files', or serve the model with vLLM and --enable-lora"
        )
    from workers.local_engine.server import serve_local_engine

    return partial(
        serve_local_engine,
        model,
        max_batch=engine.max_batch_size,
        max_length=engine.max_model_len,
        threads=settings.run.threads,
        dtype=dtype,
    )

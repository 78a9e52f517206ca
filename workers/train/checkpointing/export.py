"""A trained policy as an ordinary Hugging Face model folder."""

import shutil
from pathlib import Path
from typing import Literal

import structlog
from safetensors import SafetensorError

from stream.durable import create_folder_atomically
from stream.errors import RunFailedError, RunMismatchError
from workers.train.checkpointing.checkpoint import Checkpoint, CheckpointStore
from workers.train.checkpointing.model_card import write_cards
from workers.train.model.adapter import is_adapter, merge_adapter

log = structlog.get_logger()


def export(run_folder: Path, out: Path, which: Literal["latest", "best"] | int = "latest") -> Checkpoint:
    """Copy a checkpoint's model to a new folder, check that it loads, and write its model card.

    An adapter is merged into its base model; the adapter itself is copied to `adapter/`.

    Args:
        run_folder: the run's folder, with `checkpoints/` in it.
        out: a folder that does not exist or is empty.
        which: the newest checkpoint, the one with the best mean reward, or the one of a step.

    Returns:
        The checkpoint that was exported.

    Raises:
        RunMismatchError: there is no such checkpoint, or `out` is not empty.
        SettingsError: the base model of an adapter is missing.
        RunFailedError: the copy does not load; nothing is left at `out`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunMismatchError(f"{out} exists and is not empty; name a folder that is new or empty")
    checkpoints = CheckpointStore(run_folder / "checkpoints")
    found = {"latest": checkpoints.latest, "best": checkpoints.best}
    checkpoint = checkpoints.at_step(which) if isinstance(which, int) else found[which]()
    if checkpoint is None:
        steps = ", ".join(str(c.progress.step) for c in checkpoints.list_all()) or "none"
        raise RunMismatchError(f"{run_folder}: no intact checkpoint {which}; steps with a checkpoint: {steps}")
    if out.is_dir():
        out.rmdir()
    with create_folder_atomically(out) as temporary:
        if is_adapter(checkpoint.model):
            merge_adapter(checkpoint.model, temporary)
            shutil.copytree(checkpoint.model, temporary / "adapter")
        else:
            shutil.copytree(checkpoint.model, temporary, dirs_exist_ok=True)
        _verify(temporary)
        write_cards(run_folder, temporary, checkpoint.progress.step, checkpoint.progress)
    log.info("model.exported", step=checkpoint.progress.step, version=checkpoint.progress.version, folder=str(out))
    return checkpoint


def _verify(folder: Path) -> None:
    """Load the model, and the tokenizer if there is one."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        if any(folder.glob("tokenizer*")):
            transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RunFailedError(f"{folder}: the exported model does not load: {error}") from error

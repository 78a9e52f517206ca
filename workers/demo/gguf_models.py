"""A model folder that can be trained, from a GGUF file.

GGUF is the format of llama.cpp: one file with weights, configuration, tokenizer and chat template, and most of them
quantized. Transformers reads it and undoes the quantization. What it would lose without a word is refused here or
reported: a weight that is missing, scaled rotary positions, and a tokenizer whose way to split text it does not know.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from msgspec import Struct

from stream.disk_space import free_bytes, no_room
from stream.durable import create_folder_atomically
from stream.errors import SettingsError
from workers.train.checkpointing.markdown import escape_markdown, identifier, render_card

Dtype = Literal["bfloat16", "float32"]

_MAGIC: Final = b"GGUF"
_BYTES: Final[dict[Dtype, int]] = {"bfloat16": 2, "float32": 4}
_OTHER_FILES_BYTES: Final = 32 << 20
"""Room for tokenizer and configuration, and some to spare."""
_NOT_QUANTIZED: Final = frozenset({"F64", "F32", "F16", "BF16"})
_ROPE_FACTORS: Final = "rope_freqs.weight"
"""Tensor with factors of rotary frequencies, as Llama 3.1 has them."""
_GPT2_SPLITS: Final = frozenset({"default", "gpt-2", "gpt2"})
"""Names of the way in which GPT-2 splits text before it merges tokens."""
_DIGITS_SPLIT: Final = frozenset({"smollm"})
"""Names of a split as GPT-2's, with each digit for itself. Transformers takes these for GPT-2's."""
_HUB: Final = re.compile(r"https?://huggingface\.co/([\w.-]+/[\w.-]+)/?\Z")


class GgufReport(Struct, frozen=True, kw_only=True):
    """What `write_gguf_model` read and wrote."""

    file: Path
    file_bytes: int
    tensors: dict[str, int]
    """Number of tensors by their type in the file, such as `Q4_1`."""
    architecture: str
    """Name of transformers' class."""
    parameters: int
    weight_bytes: int
    """Size of the weights that were written."""
    dtype: Dtype
    vocabulary: int
    context: int
    """Most tokens of a sequence."""
    has_chat_template: bool
    notes: list[str]
    """What differs from the original model, or may do so."""

    @property
    def undone(self) -> str:
        """The quantizations that were undone, with their numbers of tensors; empty if there was none."""
        return ", ".join(f"{kind} in {n:,}" for kind, n in self.tensors.items() if kind not in _NOT_QUANTIZED)

    def lines(self) -> list[str]:
        """Return the report as lines for people."""
        kept = ", ".join(f"{kind} in {n:,}" for kind, n in self.tensors.items() if kind in _NOT_QUANTIZED)
        undone = f"quantization undone: {self.undone} tensors" if self.undone else "not quantized"
        template = "with a chat template" if self.has_chat_template else "without a chat template"
        sizes = f"{self.parameters / 1e6:,.1f} million parameters, {self.dtype}, {self.weight_bytes / 1e6:,.1f} MB"
        return [
            f"{self.file} ({self.file_bytes / 1e6:,.1f} MB): {undone}{f'; {kept} tensors' if kept else ''}",
            f"{self.architecture}: {sizes}; {self.vocabulary:,} tokens, context {self.context:,}, {template}",
            *(f"note: {note}" for note in self.notes),
        ]


def write_gguf_model(source: Path, folder: Path, dtype: Dtype = "bfloat16") -> GgufReport:
    """Write the model of a GGUF file to a new folder, in Hugging Face format and without quantization.

    Args:
        source: the file, or a folder with one such file.
        folder: target; absent or empty. It appears complete, or not at all.
        dtype: of the written weights.

    Returns:
        What was read and written.

    Raises:
        SettingsError: there is no such file, it is not GGUF, or damaged; a package is missing; its architecture or its
            tokenizer is not supported; the disk has no room; `folder` holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{folder} exists and is not empty; name a folder that is new or empty")
    file = _find(source)
    header = _read_header(file)
    _check_room(folder, header.elements * _BYTES[dtype] + _OTHER_FILES_BYTES)
    if folder.is_dir():
        folder.rmdir()
    try:
        with create_folder_atomically(folder) as temporary, _alone(file) as link, _bars_for_people():
            report = _convert(header, link, temporary, dtype)
            (temporary / "README.md").write_text(_card(header, report), encoding="utf-8")
    except Exception as error:
        if reason := no_room(error):
            raise SettingsError(f"{folder}: {reason}; nothing was written; make room, or name another disk") from error
        raise
    return report


class _Header(Struct, frozen=True, kw_only=True):
    """What a GGUF file says of its model."""

    file: Path
    fields: dict[str, Any]
    """Texts and numbers by name; of an array, its length."""
    tensors: dict[str, int]
    """Number of tensors by type."""
    names: frozenset[str]
    """Names of the tensors."""
    elements: int
    """Numbers in all tensors."""


def _find(source: Path) -> Path:
    """Return the GGUF file that a path names."""
    if not source.exists():
        raise SettingsError(f"{source}: there is no such file or folder")
    if source.is_file():
        return source
    files = sorted(path for path in source.iterdir() if path.suffix == ".gguf" and path.is_file())
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise SettingsError(f"{source}: one .gguf file is wanted, and the folder has: {names}; name the file")
    return files[0]


def _read_header(file: Path) -> _Header:
    """Read what a GGUF file says of its model.

    Raises:
        SettingsError: it is no GGUF file, damaged, one part of several, or has no tokenizer.
    """
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise SettingsError(f"{file} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
    try:
        import gguf
    except ImportError as error:
        raise SettingsError("GGUF files need further packages: pip install 'penstock[gguf]'") from error
    try:
        reader = gguf.GGUFReader(file)
        fields = {
            name: len(field.data) if gguf.GGUFValueType.ARRAY in field.types else field.contents()
            for name, field in reader.fields.items()
        }
    except (ValueError, LookupError, OverflowError) as error:
        raise SettingsError(f"{file} is damaged or incomplete; copy or download it again ({error})") from error
    if fields.get("split.count", 0) > 1:
        raise SettingsError(
            f"{file} is one of {fields['split.count']} parts; join them first: llama-gguf-split --merge FIRST_PART OUT"
        )
    if not fields.get("tokenizer.ggml.tokens"):
        raise SettingsError(f"{file} has no tokenizer; take a file that was made with one")
    return _Header(
        file=file,
        fields=fields,
        tensors=dict(Counter(tensor.tensor_type.name for tensor in reader.tensors).most_common()),
        names=frozenset(tensor.name for tensor in reader.tensors),
        elements=sum(int(tensor.n_elements) for tensor in reader.tensors),
    )


def _check_room(folder: Path, needed: int) -> None:
    free = free_bytes(folder.absolute())
    if free is not None and free < needed:
        raise SettingsError(
            f"{folder}: the model takes {needed / 1e6:,.0f} MB, and its disk has {free / 1e6:,.0f} MB free; make room, "
            "or name a folder on another disk"
        )


@contextmanager
def _alone(file: Path) -> Iterator[Path]:
    """Yield a link to the file in a folder of its own.

    Transformers would take a tokenizer or a template that lies beside the file for the file's own.
    """
    with TemporaryDirectory() as folder:
        link = Path(folder) / "model.gguf"
        link.symlink_to(file.absolute())
        yield link


def _convert(header: _Header, link: Path, folder: Path, dtype: Dtype) -> GgufReport:
    """Write configuration, weights and tokenizer of a GGUF file that lies alone to an existing folder."""
    import torch
    import transformers

    architecture = header.fields.get("general.architecture", "")
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            link.parent,
            gguf_file=str(link),  # a bare name would first be looked for in the working directory
            dtype=getattr(torch, dtype),
            quantization_config=transformers.GgufConfig(dequantize=True),
            output_loading_info=True,
            local_files_only=True,
        )
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        raise SettingsError(
            f"{header.file}: transformers {transformers.__version__} does not read this model of architecture "
            f"{architecture!r}: {_first_line(error)}"
        ) from error
    if missing := sorted(loading["missing_keys"]):
        raise SettingsError(
            f"{header.file} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}; a file that "
            "llama.cpp made of the whole model has all"
        )
    _check_positions(header, model.config)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer, notes = _tokenizer(header, link, model.config.max_position_embeddings)
    tokenizer.save_pretrained(folder)
    weights = list(folder.glob("*.safetensors"))
    return GgufReport(
        file=header.file,
        file_bytes=header.file.stat().st_size,
        tensors=header.tensors,
        architecture=type(model).__name__,
        parameters=model.num_parameters(),
        weight_bytes=sum(path.stat().st_size for path in weights),
        dtype=dtype,
        vocabulary=len(tokenizer),
        context=model.config.max_position_embeddings,
        has_chat_template=bool(tokenizer.chat_template),
        notes=notes,
    )


@contextmanager
def _bars_for_people() -> Iterator[None]:
    """Keep transformers' bars, which go to stderr, out of logs and pipes."""
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO()):
        yield


def _check_positions(header: _Header, config: Any) -> None:
    """Refuse a model whose rotary positions are scaled in the file, and not in the configuration made of it."""
    architecture = header.fields.get("general.architecture", "")
    kind = header.fields.get(f"{architecture}.rope.scaling.type", "none")
    is_scaled = _ROPE_FACTORS in header.names or kind != "none"
    if is_scaled and (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") == "default":
        raise SettingsError(
            f"{header.file} scales its rotary positions ({kind if kind != 'none' else _ROPE_FACTORS}), which "
            "transformers' reader leaves out: the result would be another model; take the model's own folder instead"
        )


def _tokenizer(header: _Header, link: Path, context: int) -> tuple[Any, list[str]]:
    """Return the tokenizer, and notes about how it splits text."""
    import transformers
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            link.parent, gguf_file=str(link), local_files_only=True, model_max_length=context
        )
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        raise SettingsError(f"{header.file}: its tokenizer cannot be read: {_first_line(error)}") from error
    notes = []
    split = header.fields.get("tokenizer.ggml.pre", "default")
    if header.fields.get("tokenizer.ggml.model") != "gpt2":
        pass  # sentencepiece and others do not split text first
    elif split in _DIGITS_SPLIT:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif split not in _GPT2_SPLITS and split not in GGUF_PRE_TOKENIZER_SPLITS:
        notes.append(
            f"transformers does not know how the tokenizer splits text ({split}) and splits it as GPT-2 does: some "
            "texts become other tokens than in the original"
        )
    if not tokenizer.chat_template:
        notes.append("the file has no chat template; put the model's own into chat_template.jinja")
    return tokenizer, notes


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _card(header: _Header, report: GgufReport) -> str:
    """Return a model card that names the file, and the license and the original that it claims."""
    from huggingface_hub import ModelCardData

    fields = header.fields
    original = _HUB.match(str(fields.get("general.base_model.0.repo_url", "")))
    license_name = identifier(str(fields.get("general.license", "")).lower())
    name = str(fields.get("general.name", "")) or header.file.stem
    text = (
        f"# {escape_markdown(name)}\n\n"
        f"Made by `penstock base-model` from {escape_markdown(header.file.name)}, a GGUF file. Quantization that was "
        f"undone: {report.undone or 'none'}{' tensors' if report.undone else ''}. Weights that were quantized differ "
        "from the original's.\n"
    )
    metadata = ModelCardData(
        license=license_name or None,
        base_model=original.group(1) if original else None,
        library_name="transformers",
        pipeline_tag="text-generation",
    )
    return render_card(metadata, text)

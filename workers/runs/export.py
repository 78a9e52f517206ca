"""Completions as records with tokens, masks and advantages, in JSON lines or Parquet.

Groups are read and written one at a time, in the order of the ledger. Masks and advantages are those that the trainer
used: it records them with each step, so that neither the model nor the other groups of the step are needed again.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, structs

from envs.references import import_extra
from stream.errors import PenstockError, SettingsError
from stream.records import Message, TrainedCompletion
from workers.runs.groups import ArchivedRunGroups, CompletionView
from workers.runs.selection import CompletionFilter
from workers.runs.tokens import loss_counts, token_columns, trained_row

Format = Literal["jsonl", "parquet"]
_BATCH: Final = 64
"""Completions in one row group of a Parquet file."""


class ExportReport(Struct, frozen=True, kw_only=True):
    """What was written."""

    path: str
    """The file; `-`: stdout."""
    count: int
    """Completions."""
    missing: int
    """Groups of the ledger that are not archived any more."""
    damaged: list[str]
    """Messages about groups that could not be read."""

    def __str__(self) -> str:
        missing = f"; {self.missing} more groups are not archived any more (archive.keep)" if self.missing else ""
        return f"{self.count} completions{missing}" + ("" if self.path == "-" else f": {self.path}")


def export_completions(folder: Path, out: str, format_: Format | None, wanted: CompletionFilter) -> ExportReport:
    """Write a run's archived completions.

    Args:
        folder: of the run.
        out: the file; `-`: stdout, as JSONL; empty: `groups.jsonl` or `groups.parquet` in the run's folder.
        format_: None: as the file's name ends.
        wanted: which completions.

    Raises:
        SettingsError: the format is unknown.
        PenstockError: nothing matches, or the file exists.
    """
    format_ = format_ or _format_of(out)
    archived = ArchivedRunGroups(folder)
    rows = (
        completion_record(archived.with_trained_tokens(view))
        for view in archived.completions(wanted.steps)
        if wanted.matches(view)
    )
    if out == "-" and format_ == "parquet":
        raise SettingsError("Parquet is not written to stdout: name a file")
    path = Path(out) if out else folder / f"groups.{format_}"
    if out == "-":
        count = _write_lines(sys.stdout.buffer.write, rows)
        sys.stdout.flush()
    else:
        count = write_export(path, rows, format_)
    return ExportReport(
        path="-" if out == "-" else str(path), count=count, missing=archived.missing, damaged=archived.damaged
    )


def write_export(path: Path, rows: Iterable[dict[str, Any]], format_: Format) -> int:
    """Write rows to a new file, which appears complete or not at all. Returns their number.

    Raises:
        PenstockError: the file exists, or there is no row.
    """
    with _new_file(path) as temporary:
        if format_ == "parquet":
            count = _write_parquet(temporary, rows)
        else:
            with temporary.open("wb") as file:
                count = _write_lines(file.write, rows)
        if not count:
            raise PenstockError("no archived completion matches; `penstock show` says what the archive has")
    return count


def completion_record(view: CompletionView) -> dict[str, Any]:
    """Return one completion as a record, for exports and `--json`."""
    group, completion = view.group, view.completion
    return view.describe() | {
        "prompt_fields": group.prompt.fields,
        "prompt_messages": completion.prompt_messages,
        "messages": completion.messages,
        "tool_runs": [{"seconds": run.seconds, "is_error": run.is_error} for run in completion.tool_runs],
        "parts": [
            {
                "name": part.name,
                "weight": part.weight,
                "turn": part.turn,
                "value": getattr(part.reward, "value", None),
                "reason": part.reward.reason,
                "detail": part.reward.detail,
            }
            for part in completion.parts
        ],
        "extra": completion.extra,
        "rows": token_rows(view),
    }


def token_rows(view: CompletionView) -> list[dict[str, Any]]:
    """Return the rows of a completion as columns, with one value for each token after the prompt."""
    rows: list[dict[str, Any]] = []
    # A completion of no step bears no loss.
    counts = loss_counts(view.completion, view.trained or TrainedCompletion("", None, 0))
    for number, (row, count) in enumerate(zip(view.completion.rows, counts, strict=True)):
        columns = token_columns(row, trained_row(view.trained, number))
        if columns.loss_mask is None and count is not None:  # none of its tokens bears loss, or all do
            mask = columns.sampled_mask if count else [0] * len(columns.sampled_mask)
            columns = structs.replace(columns, loss_mask=mask)
        rows.append({"prompt_ids": row.prompt.tolist(), **structs.asdict(columns)})
    return rows


def encode_json(value: Any) -> bytes:
    """Return a value as JSON. Values and keys of user code that JSON does not have, such as the key None, become text.

    A reward function may pass `{True: 3}` to `log_extra`; a row of an environment may have it in a column.
    """
    try:
        return msgspec.json.encode(value)
    except TypeError:
        return msgspec.json.encode(_with_text_keys(value), enc_hook=str)


def _format_of(out: str) -> Format:
    formats: dict[str, Format] = {".jsonl": "jsonl", ".parquet": "parquet"}
    if out == "-":
        return "jsonl"
    try:
        return formats[Path(out).suffix]
    except KeyError:
        raise SettingsError("give --jsonl or --parquet, or a file that ends in .jsonl or .parquet") from None


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed on success and removed on an error."""
    if path.exists():
        raise PenstockError(f"{path} exists already: remove it, or name another file")
    if not path.parent.is_dir():
        raise PenstockError(f"{path.parent} is no folder")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.rename(path)
    except OSError as error:
        raise PenstockError(f"{path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_lines(write: Callable[[bytes], object], rows: Iterable[dict[str, Any]]) -> int:
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        write(encode_json(row) + b"\n")
    return count


def _write_parquet(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    pa = import_extra("pyarrow", "data")
    parquet = import_extra("pyarrow.parquet", "data")
    schema = _parquet_schema(pa)
    count, batch = 0, list[dict[str, Any]]()
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for count, row in enumerate(rows, 1):  # noqa: B007
            batch.append(_parquet_row(row))
            if len(batch) == _BATCH:
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
                batch.clear()
        if batch:
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
    return count


def _parquet_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with values of any form as JSON text, so that all rows have one schema."""
    return row | {
        "prompt_fields": _json(row["prompt_fields"]),
        "extra": _json(row["extra"]),
        "prompt_messages": [_parquet_message(message) for message in row["prompt_messages"]],
        "messages": [_parquet_message(message) for message in row["messages"]],
    }


def _parquet_message(message: Message) -> dict[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    return {
        "role": str(message.get("role", "")),
        "content": content if content is None or isinstance(content, str) else _json(content),
        "tool_calls": None if calls is None else _json(calls),
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
    }


def _json(value: object) -> str:
    return encode_json(value).decode()


def _parquet_schema(pa: Any) -> Any:
    text, whole, number, flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()
    message = pa.struct(dict.fromkeys(("role", "content", "tool_calls", "tool_call_id", "name"), text))
    run = pa.struct({"seconds": number, "is_error": flag})
    rewritten = pa.struct({"row": whole, "by": text})
    branch = {
        "number": whole, "label": text, "role": text, "name": text, "turns": whole, "rows": pa.list_(whole),
        "sampled_tokens": whole, "loss_tokens": whole, "parent": whole, "after_turn": whole, "limited": text,
        "rewritten": pa.list_(rewritten), "discarded": text,
    }  # fmt: skip
    part = {"name": text, "weight": number, "turn": whole, "value": number, "reason": text, "detail": text}
    masks = {name: pa.list_(pa.int8()) for name in ("sampled_mask", "loss_mask")}
    ids = {name: pa.list_(pa.int32()) for name in ("prompt_ids", "token_ids")}
    floats = {name: pa.list_(pa.float32()) for name in ("logprobs", "advantages", "logprob_differences")}
    tokens = ids | masks | floats | {"versions": pa.list_(pa.int32()), "rejected_by": pa.list_(text)}
    columns = {
        "prompt_id": text, "completion": whole, "greedy": flag, "environment": text, "epoch": whole, "row": whole,
        "step": whole, "outcome": text, "versions": pa.list_(whole), "end": text, "why_invalid": text, "state": text,
        "reward": number, "advantage": number, "loss_tokens": whole, "turns": whole, "tool_calls": whole,
        "tool_errors": whole, "sampled_tokens": whole, "branches": pa.list_(pa.struct(branch)), "worker": text,
        "sampled_at": number, "prompt_fields": text,
        "prompt_messages": pa.list_(message), "messages": pa.list_(message), "tool_runs": pa.list_(run),
        "parts": pa.list_(pa.struct(part)), "extra": text, "rows": pa.list_(pa.struct(tokens)),
    }  # fmt: skip
    return pa.schema(columns)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    return value

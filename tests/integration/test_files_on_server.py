"""What the trainer puts on the server for workers without the run's folder and the model's."""

import anyio
import pytest

from stream.connection.model_files import MODEL_FILES, download_model_files, upload_model_files
from stream.errors import RecordError
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_ends import download_ends
from stream.trainer.ledger_records import Dropped, LedgerRecord, Trained
from stream.trainer.trainer_lease import TrainerLease


async def test_a_worker_gets_the_models_files_as_the_trainer_has_them(connection, tmp_path):
    tokenizer, template = b'{"model": ' + b"x" * 100_000, "{{ 'ä' }}".encode()
    await anyio.Path(tmp_path / "tokenizer.json").write_bytes(tokenizer)
    await anyio.Path(tmp_path / "model.safetensors").write_bytes(b"weights")
    await anyio.Path(tmp_path / "config.json").write_bytes(b"{}")
    assert await download_model_files(connection) == {}
    await upload_model_files(connection, tmp_path)
    await anyio.Path(tmp_path / "config.json").unlink()
    await anyio.Path(tmp_path / "chat_template.jinja").write_bytes(template)
    await upload_model_files(connection, tmp_path)
    assert await download_model_files(connection) == {"tokenizer.json": tokenizer, "chat_template.jinja": template}
    assert await connection.redis.memory_usage(connection.key("model_files")) < 10_000


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda packed: packed[:-1], id="cut off"),
        pytest.param(lambda packed: packed[:32], id="empty"),
        pytest.param(lambda packed: b"x" + packed[1:], id="another digest"),
    ],
)
async def test_a_damaged_file_is_refused_with_its_name(connection, tmp_path, harm):
    name = MODEL_FILES[0]
    await anyio.Path(tmp_path / name).write_bytes(b"{}")
    await upload_model_files(connection, tmp_path)
    key = connection.key("model_files")
    await connection.redis.hset(key, name, harm(await connection.redis.hget(key, name)))
    with pytest.raises(RecordError, match=rf"{name} .* is damaged: restart the trainer"):
        await download_model_files(connection)


async def test_a_feeder_gets_the_ledgers_ends_while_nothing_is_fed(pipe, tmp_path):
    def write() -> int:
        ledger = Ledger(tmp_path / "ledger.jsonl")
        ledger.append([LedgerRecord("a", Trained(), 1, 0, ""), LedgerRecord("b", Dropped("stale"), 1, 0, "")])
        ledger.close()
        return ledger.path.stat().st_size

    ledger_bytes = await anyio.to_thread.run_sync(write)
    ledger = await anyio.to_thread.run_sync(lambda: Ledger(tmp_path / "ledger.jsonl", ledger_bytes))
    lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await lease.recover(ledger)
    policy = await pipe.connection.read_hash("policy")
    assert policy["ledger"] == str(ledger_bytes)
    assert await download_ends(pipe.connection, ledger_bytes) == {"a": "trained", "b": "dropped:stale"}
    assert await download_ends(pipe.connection, ledger_bytes + 1) is None
    await pipe.feed("c")
    await lease.recover(ledger)
    assert await download_ends(pipe.connection, ledger_bytes) is None
    ledger.close()

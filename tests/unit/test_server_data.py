"""The private server's files are checked before it starts, whatever their digests say."""

import pytest

from stream import server_data


@pytest.mark.parametrize("digests", [b"", b"\xff", b"[" * 200_000])
def test_unreadable_digests_set_the_data_aside(tmp_path, digests):
    data = tmp_path / "redis"
    (data / "appendonlydir").mkdir(parents=True)
    (data / "appendonlydir" / "appendonly.aof.manifest").write_text("file a seq 1 type b\n")
    (data / server_data.DIGESTS).write_bytes(digests)
    server_data.prepare(data)
    assert not (data / server_data.DIGESTS).exists()
    assert not (data / "appendonlydir").exists()

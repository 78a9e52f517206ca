"""The private server's files are checked before it starts, whatever their digests say."""

import pytest

from stream import private_server


@pytest.mark.parametrize(
    "digests", [b"", b'{"a.aof": "01', b"\xff", b"[" * 200_000], ids=["empty", "torn", "junk", "deep"]
)
def test_digests_that_cannot_be_read_do_not_condemn_good_data(tmp_path, digests):
    data = tmp_path / "redis"
    (data / "appendonlydir").mkdir(parents=True)
    (data / "appendonlydir" / "a.1.incr.aof").write_bytes(b"commands")
    (data / private_server.DIGESTS).write_bytes(digests)
    private_server.prepare(data)
    assert not (data / private_server.DIGESTS).exists()
    assert (data / "appendonlydir" / "a.1.incr.aof").read_bytes() == b"commands"
    assert list(data.glob("damaged-*")) == []

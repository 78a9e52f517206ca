"""A role of the next version of Penstock: its records have one more field, and SCHEMA is higher by `--schema-step`.

next_version.py STEP rollout FILE --redis URL --engine URL
next_version.py STEP trainer FILE --redis URL --engine URL      with the witness of tests/soak
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import msgspec

from penstock.__main__ import main
from stream import codec
from tests.soak import role


class Encoder:
    """Adds a field that this version does not know, to each record and to each completion."""

    def __init__(self, encoder: msgspec.msgpack.Encoder) -> None:
        self._encoder = encoder

    def encode(self, record: msgspec.Struct) -> bytes:
        table = msgspec.msgpack.decode(self._encoder.encode(record))
        for each in table.get("completions", []):
            each["added_later"] = {"a": [1]}
        return self._encoder.encode(table | {"added_later": "x"})


def become_next_version(schema_step: int) -> None:
    """Change the records that this process writes, and the newest that it reads."""
    codec._encoder = Encoder(codec._encoder)
    codec.SCHEMA += schema_step


if __name__ == "__main__":
    become_next_version(int(sys.argv.pop(1)))
    if sys.argv[1] == "trainer":
        sys.exit(role.main(["train", *sys.argv[2:]]))
    sys.exit(main())

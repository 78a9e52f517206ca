"""A process's resident memory is measured in bytes."""

import mmap

from workers.role.watchdogs import resident_bytes

MIB = 1 << 20


def test_touching_64_mib_adds_about_64_mib():
    before = resident_bytes()
    with mmap.mmap(-1, 64 * MIB) as block:
        for offset in range(0, len(block), mmap.PAGESIZE):
            block[offset] = 1
        grown = resident_bytes() - before
    assert 60 * MIB < grown < 96 * MIB

"""The memory of the local engine's keys and values: what is written takes some, and what is given back is zero."""

import mmap
from pathlib import Path

import pytest
import torch

from workers.local_engine.kv_cache import PrefixCache, SlotKVCache
from workers.local_engine.model_thread import Generation
from workers.local_engine.scheduler import AdmissionQueue

HEADS, SIZE, LENGTH = 2, 64, 512
TOKEN = HEADS * SIZE * 4


def write(cache, slot, start, count, value=1.0, layers=2):
    """Write the same states at some positions of a slot."""
    places = slot * LENGTH + torch.arange(start, start + count)
    cache.begin_pass(slice(slot, slot + 1), start + count, places, None)
    states = torch.full((1, HEADS, count, SIZE), value)
    return [cache.update(states, states, layer) for layer in range(layers)]


def resident_kb():
    with Path("/proc/self/smaps_rollup").open() as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:"))


def test_memory_is_taken_where_something_is_written():
    cache = SlotKVCache(4, LENGTH)
    assert (cache.written_tokens, cache.token_bytes) == (0, 0)
    write(cache, 1, 0, 100)
    write(cache, 1, 100, 20)
    cache.copy_slot(1, 3, 50)
    assert cache.written_tokens == 120 + 50
    assert cache.token_bytes == 4 * TOKEN, "keys and values of two layers"


def test_what_is_released_is_zero_and_what_is_kept_is_not():
    cache = SlotKVCache(2, LENGTH)
    write(cache, 0, 0, 300)
    write(cache, 1, 0, 300)
    cache.release({0: 100})
    assert cache.written_tokens == 100
    page = mmap.PAGESIZE // TOKEN
    keys, _ = write(cache, 0, 400, 1)[0]
    assert bool((keys[0, :, :100] == 1).all())
    assert not keys[0, :, 100 + page : 300 - page].any()


def test_released_memory_goes_back_to_the_machine():
    cache = SlotKVCache(64, LENGTH)
    write(cache, 0, 0, 1)
    before = resident_kb()
    for slot in range(64):
        write(cache, slot, 0, LENGTH)
    full = resident_kb()
    cache.release({})
    assert full - before > 0.9 * 64 * LENGTH * 4 * TOKEN / 1024
    assert resident_kb() - before < 0.1 * (full - before)


def test_a_short_sequence_in_a_long_slot_takes_little():
    """With huge pages each of 64 slots would take 2 MiB of each tensor."""
    cache = SlotKVCache(64, 64 * LENGTH)
    before = resident_kb()
    for slot in range(64):
        cache.begin_pass(slice(slot, slot + 1), 4, slot * 64 * LENGTH + torch.arange(4), None)
        states = torch.ones(1, HEADS, 4, SIZE)
        cache.update(states, states, 0)
    assert resident_kb() - before < 64 * 2 * 100


def test_the_least_recently_used_sequences_are_forgotten_until_the_others_fit():
    prefixes = PrefixCache(range(3))
    sequences = [bytes(4 * n) for n in (10, 20, 30)]
    slots = [prefixes.reserve(each) for each in sequences]
    prefixes.shrink(55)
    assert prefixes.lengths == {slots[1]: 20, slots[2]: 30}
    prefixes.shrink(0)
    assert prefixes.lengths == {}


class BoundedModel:
    """A model with memory for a given number of tokens; it records which slots are kept."""

    def __init__(self, max_cached_tokens: int) -> None:
        self.max_cached_tokens = max_cached_tokens
        self.kept: dict[int, int] = {}

    def fit_cache(self, kept):
        self.kept = dict(kept)


def generation(prompt, more):
    from workers.engine_api.wire import GenerateRequest, SamplingParams

    request = GenerateRequest(token_ids=list(range(prompt)), sampling_params=SamplingParams(max_tokens=more))
    return Generation(request, vocab_size=1000, max_length=500, eos_token_ids=frozenset(), wake=lambda: None)


@pytest.mark.parametrize(("running", "fitting"), [([], 3), ([(10, 90)], 2), ([(10, 90), (10, 90), (10, 90)], 0)])
def test_requests_wait_until_they_fit_at_their_greatest_lengths(running, fitting):
    queue = AdmissionQueue(BoundedModel(310), PrefixCache(range(8, 16)), 8)
    queue.waiting.extend(generation(10, 90) for _ in range(4))
    has_room = queue.should_prefill([generation(*each) for each in running])
    assert has_room == bool(fitting)
    assert queue._count_fitting([generation(*each) for each in running]) == fitting


def test_running_sequences_take_the_room_of_finished_ones():
    model, prefixes = BoundedModel(310), PrefixCache(range(8, 16))
    queue = AdmissionQueue(model, prefixes, 8)
    old, new = prefixes.reserve(bytes(4 * 100)), prefixes.reserve(bytes(4 * 101))
    queue.fit_cache([generation(10, 90)])
    assert prefixes.lengths == {old: 100, new: 101}
    queue.fit_cache([generation(10, 90), generation(10, 90)])
    assert prefixes.lengths == {new: 101}
    assert model.kept == {0: 9, 1: 9, new: 101}

"""Random sequences of actions by workers, trainer, feeder and clock on a real server.

After every step the account balances, each open prompt is in exactly one place, and no claim exceeds the capacity.
At the end the run is completed: nothing may be left, and no prompt may be in the trained history twice.
"""

import tempfile
import uuid
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from stream.connection.keys import STAGES
from stream.connection.run_connection import connect
from stream.errors import LeaseLostError
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters, retry_dead_letters
from stream.operator.status import read_status
from stream.queue.feed import Feed
from stream.queue.progress_writer import ProgressPart
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Completion, Group, Prompt
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import AlreadyEnded, Dropped, LedgerRecord, Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from tests.cases.progress import completion_part, save, turn_part
from tests.cases.records import assert_records_are_owned

CAPACITY = 4
WORKERS = ("w0", "w1", "w2")
NEXT = {"prompts": "groups", "groups": "scored"}
TERMS = RetryPolicy(lease_s=600.0, infra_attempts=3, data_attempts=2, backoff_s=100.0)

workers, stages, picks = st.sampled_from(WORKERS), st.sampled_from(list(NEXT)), st.integers(0, 50)


class Run(RuleBasedStateMachine):
    """A run whose trainer is sometimes killed; time passes only where a rule advances it."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.loop = start_blocking_portal("asyncio")
        self.call = self.loop.__enter__().call
        self.folder = tempfile.TemporaryDirectory()
        self._connection = connect(url, f"machine-{uuid.uuid4().hex}")
        self.connection = self.call(self._connection.__aenter__)
        self.stages = {
            (s, w): Stage(self.connection, s, w, TERMS, CAPACITY if s == "prompts" else None)
            for s in NEXT
            for w in WORKERS
        }
        self.leases = []  # (stage, lease), current or expired
        self.came_again = set()  # prompts delivered again after they ended; the server does not know when they started
        self.fed = 0
        self.kept = 0
        self.deaths = 0
        self.version = 0
        self.begin()
        self.begin_with_entries_everywhere()

    def teardown(self) -> None:
        try:
            self.finish_run()
        finally:
            self.ledger.close()
            self.call(self._connection.__aexit__, None, None, None)
            self.loop.__exit__(None, None, None)
            self.folder.cleanup()

    def begin_with_entries_everywhere(self) -> None:
        """Fill every stage, a lease and the ledger at the start; few random examples would reach these states."""
        self.feed(8)
        self.claim("prompts", "w0", CAPACITY)
        for _ in range(CAPACITY):
            self.end_a_lease(0, "complete")
        self.claim("groups", "w1", 3)
        for _ in range(2):
            self.end_a_lease(0, "complete")
        self.train(1, Trained())
        self.publish()
        self.claim("prompts", "w2", 1)

    # -- the feeder and the workers

    @rule(count=st.integers(1, 3))
    def feed(self, count) -> None:
        prompts = [Prompt(id=f"p{self.fed + i}", messages=[]) for i in range(count)]
        self.call(Feed(self.connection, 1000).put, prompts, str(self.fed or ""), str(self.fed + count))
        self.fed += count

    @rule(stage=stages, worker=workers, count=st.integers(1, 4))
    def claim(self, stage, worker, count) -> None:
        before = self.call(read_status, self.connection).outstanding
        claim = self.call(self.stages[stage, worker].claim, count)
        self.leases += [(self.stages[stage, worker], lease) for lease in claim.leases]
        assert len(claim.leases) <= count
        assert self.call(read_status, self.connection).outstanding <= max(before, CAPACITY)

    @precondition(lambda self: self.leases)
    @rule(
        pick=picks,
        how=st.sampled_from(["complete", "complete", "complete", "infra", "data", "none", "stale", "dead_letter"]),
    )
    def end_a_lease(self, pick, how) -> None:
        stage, lease = self.leases.pop(pick % len(self.leases))
        try:
            match how:
                case "complete":
                    group = Group(
                        prompt=Prompt(id=lease.prompt_id, messages=[]), completions=[Completion(index=0, turns=2)]
                    )
                    self.call(stage.complete, lease, NEXT[stage.name], group)
                case "dead_letter":
                    self.call(stage.dead_letter, lease, "unreadable", "altered")
                case _:
                    self.call(stage.release, lease, how, "")
        except LeaseLostError:
            assert lease.lost

    @precondition(lambda self: self.leases)
    @rule(pick=picks, index=st.integers(0, 3))
    def save_a_completion(self, pick, index) -> None:
        """Save a completion under a current or an expired lease."""
        stage, lease = self.leases[pick % len(self.leases)]
        turns = [name for name in self.saved_turns(lease) if name.startswith(f"{index}/")]
        self.call(save, stage, lease, completion_part(Completion(index=index, turns=2), turns))

    @precondition(lambda self: self.leases)
    @rule(pick=picks, name=st.sampled_from(["0/0", "0/1", "1/0", "1/1"]))
    def save_a_turn(self, pick, name) -> None:
        """Save a turn under a current or an expired lease."""
        stage, lease = self.leases[pick % len(self.leases)]
        self.call(save, stage, lease, turn_part(name))

    @precondition(lambda self: self.leases)
    @rule(pick=picks, index=st.integers(0, 1), method=st.sampled_from(["replay", "anew"]))
    def restore_a_completion(self, pick, index, method) -> None:
        """Restore a completion, or begin it anew."""
        stage, lease = self.leases[pick % len(self.leases)]
        turns = [name for name in self.saved_turns(lease) if name.startswith(f"{index}/") and method == "anew"]
        part = ProgressPart(what="resumed", field=f"{index}:{method}", record=b"attempt", names=turns)
        self.call(save, stage, lease, part)

    def saved_turns(self, lease) -> list[str]:
        names = self.call(self.connection.redis.hkeys, self.connection.key(f"prompts:turns:{lease.id}"))
        return [name.decode() for name in names if name[:1].isdigit()]

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def end_a_lease_twice(self, pick) -> None:
        """Repeat the script, as after a lost reply."""
        stage, lease = self.leases[pick % len(self.leases)]
        self.end_a_lease(pick, "complete")
        again = self.call(
            self.connection.run_script, "complete", stage.name, stage.consumer, lease.id, NEXT[stage.name], "twice", b""
        )
        assert again == 0

    @rule(what=st.sampled_from(["leases", "retries", "retries"]))
    def time_passes(self, what) -> None:
        for stage in STAGES:
            key = self.connection.key(f"{stage}:{what}")
            for entry in self.call(self.connection.redis.zrange, key, 0, -1):
                self.call(self.connection.redis.zadd, key, {entry: 0})

    @rule(pick=picks, verb=st.sampled_from([retry_dead_letters, drop_dead_letters]))
    def resolve_a_dead_letter(self, pick, verb) -> None:
        result = self.call(list_dead_letters, self.connection)
        if result:
            letter = result[pick % len(result)]
            self.call(verb, self.connection, [letter.id])
            self.came_again.add(letter.prompt_id.encode())

    # -- the trainer

    @rule(count=st.integers(1, 3), ending=st.sampled_from([Trained(), Trained(), Dropped("zero_variance")]))
    def train(self, count, ending) -> None:
        ends, lines = [], []
        for lease in self.call(self.trainer.claim, count).leases:
            known = self.ledger.outcomes.get(lease.prompt_id)
            ends.append(EndedGroup(lease, AlreadyEnded(known) if known else ending))
            if not known:
                lines.append(LedgerRecord(lease.prompt_id, ending, 1, self.version, ""))
        self.ledger.append(lines)
        assert self.commit(ends) == []

    def commit(self, ends) -> list[str]:
        self.marked += [end.lease.id for end in ends]
        return self.call(self.trainer_lease.commit, self.trainer, ends, self.version + 1)

    @rule()
    def publish(self) -> None:
        self.version = self.call(self.trainer_lease.reserve_version, self.version)
        self.call(self.trainer_lease.publish, self.version, Path(), 1, {})

    @rule()
    def checkpoint(self) -> None:
        self.kept = self.ledger.sync()
        self.call(self.trainer_lease.acknowledge, self.marked)
        self.marked = []

    @rule(in_hand=st.integers(0, 2))
    def the_trainer_is_killed(self, in_hand) -> None:
        self.call(self.trainer.claim, in_hand)
        self.ledger.close()
        self.call(self.trainer_lease.release)
        self.begin()

    def begin(self) -> None:
        self.deaths += 1
        self.marked = []
        self.ledger = Ledger(Path(self.folder.name) / "ledger", self.kept)
        self.trainer = Stage(self.connection, "scored", f"t{self.deaths}", TERMS)
        self.trainer_lease = self.call(TrainerLease.acquire, self.connection, 600.0)
        marked = self.call(self.connection.read_hash, "scored:marked")
        self.came_again |= {prompt.encode() for prompt in marked.values() if prompt not in self.ledger.outcomes}
        self.call(self.trainer_lease.recover, self.ledger)

    # -- invariants

    @invariant()
    def the_prompt_counts_add_up(self) -> None:
        counts = self.call(read_status, self.connection).prompt_counts
        assert counts.pop("fed") == self.fed == sum(counts.values())

    @invariant()
    def partials_are_deleted_with_their_entry(self) -> None:
        for stage in NEXT:
            there = {entry for entry, _ in self.call(self.connection.redis.xrange, self.connection.key(stage))}
            names = self.call(self.connection.redis.keys, self.connection.key(f"{stage}:partials:*"))
            assert {name.rpartition(b":")[2] for name in names} <= there

    @invariant()
    def the_turn_counts_add_up(self) -> None:
        counts = {name: int(n) for name, n in self.call(self.connection.read_hash, "turns").items()}
        attempts = self.call(self.connection.read_hash, "prompts:attempts")
        saved = sum(int(n) for name, n in attempts.items() if name.endswith(":sampled"))
        assert counts.get("sampled", 0) == counts.get("kept", 0) + counts.get("again", 0) + saved
        names = self.call(self.connection.redis.keys, self.connection.key("prompts:turns:*"))
        turns = sum(name[:1].isdigit() for key in names for name in self.call(self.connection.redis.hkeys, key))
        keys = self.call(self.connection.redis.keys, self.connection.key("prompts:partials:*"))
        assert saved == turns + 2 * sum(self.call(self.connection.redis.hlen, key) for key in keys)

    @invariant()
    def every_group_has_its_record_and_every_record_an_owner(self) -> None:
        self.call(assert_records_are_owned, self.connection)

    @invariant()
    def every_unfinished_prompt_is_in_one_place(self) -> None:
        unfinished, marked, started, *rest = self.call(self.snapshot)
        places, at = Counter(), {}
        outstanding = set()
        for stage, (entries, pending, leases, retries) in zip(STAGES, zip(*[iter(rest)] * 4, strict=True), strict=True):
            at |= {f"{stage}:{entry.decode()}".encode(): fields[b"prompt"] for entry, fields in entries}
            unmarked = {entry: fields for entry, fields in entries if stage != "scored" or entry not in marked}
            places.update(fields[b"prompt"] for fields in unmarked.values())
            owners = {each["message_id"]: each["consumer"] for each in pending}
            assert set(owners) <= {entry for entry, _ in entries}
            in_progress = unmarked if stage != "prompts" else set(leases)
            outstanding |= {fields[b"prompt"] for entry, fields in entries if entry in in_progress}
            assert set(retries) == {entry for entry, owner in owners.items() if owner == b"released"}
            assert set(leases) == {entry for entry, owner in owners.items() if owner not in (b"released", b"marked")}
            assert {entry for entry, owner in owners.items() if owner == b"marked"} == (
                set(marked) if stage == "scored" else set()
            )
        assert set(places.values()) <= {1}
        assert set(places) == set(unfinished)
        assert {prompt: at.get(entry) for prompt, entry in unfinished.items()} == {p: p for p in unfinished}
        assert outstanding - self.came_again <= {prompt for prompt, _ in started} <= outstanding

    async def snapshot(self) -> list:
        """Return unfinished prompts, marks, and for each stage its entries, their owners, leases and retries."""
        key = self.connection.key
        async with self.connection.redis.pipeline(transaction=True) as all_at_once:
            all_at_once.hgetall(key("unfinished")).hkeys(key("scored:marked"))
            all_at_once.zrange(key("inflight_versions"), 0, -1, withscores=True)
            for stage in STAGES:
                all_at_once.xrange(key(stage)).xpending_range(key(stage), "penstock", "-", "+", 1000)
                all_at_once.zrange(key(f"{stage}:leases"), 0, -1).zrange(key(f"{stage}:retries"), 0, -1)
            return await all_at_once.execute()

    def finish_run(self) -> None:
        for _ in range(50):
            self.time_passes("leases")
            self.time_passes("retries")
            for stage in NEXT:
                self.leases = []
                self.claim(stage, "w0", CAPACITY)
                while self.leases:
                    self.end_a_lease(0, "complete")
            self.train(CAPACITY, Trained())
            self.publish()
            if not self.call(read_status, self.connection).unfinished:
                break
        self.checkpoint()
        status = self.call(read_status, self.connection)
        assert (status.unfinished, status.outstanding) == (0, 0)
        assert [status.stages[stage].depth for stage in STAGES] == [0, 0, 0]
        notes = ("leases", "retries", "attempts", "marked")
        left = [
            self.connection.key(name)
            for name in ("unpublished", "inflight_versions", *(f"{stage}:{note}" for stage in STAGES for note in notes))
        ]
        assert self.call(self.connection.redis.exists, *left) == 0
        history = [msgspec.json.decode(text)["prompt"] for text in self.ledger.path.read_bytes().splitlines()]
        assert (
            len(history)
            == len(set(history))
            == status.prompt_counts["trained"] + status.dropped.get("zero_variance", 0)
        )


@pytest.mark.timeout(300)  # two hundred examples in the `ci` profile
def test_a_run_survives_any_order_of_events(redis_url):
    phases = set(Phase) - {Phase.shrink}  # shrinking takes minutes, and fifty steps are readable
    run_state_machine_as_test(lambda: Run(redis_url), settings=settings(stateful_step_count=50, phases=phases))

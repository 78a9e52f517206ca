"""What a process was calling when it died or hung can be read by another one."""

import os
import subprocess
import sys
import threading
import time

import anyio
import pytest
from anyio import CapacityLimiter

from envs.call import CallRunner, Ok, call_subject, describe_subject
from envs.call.call_memory import CallMemory, make_call_memory, record_calls
from workers.launch.hang_watch import end_hanging

DYING = """
import os, signal, sys, threading, time
import anyio
from envs.call import CallRunner, call_subject, describe_subject
from envs.call.call_memory import CallMemory, record_calls

class World:
    def quick(self):
        return 1

    def slow(self):
        time.sleep(60)

    def compute(self):
        9 ** int("9") ** 9

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    async def die_later(self):
        await anyio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    memory = CallMemory.open(sys.argv[1])
    record_calls(memory)
    memory.note_turn()
    runner, world = CallRunner(anyio.CapacityLimiter(8)), World()
    async with anyio.create_task_group() as tasks:
        for number, name in enumerate(sys.argv[2:]):
            call_subject.set(describe_subject(f"environment world, prompt {number}"))
            tasks.start_soon(runner.call, getattr(world, name), {}, 60)
            await anyio.sleep(0.1)

anyio.run(main)
"""


def start(memory, *methods):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-X", "faulthandler", "-c", DYING, memory.path, *methods], env=environment)


@pytest.mark.parametrize("end", ["die", "die_later"])
def test_the_calls_of_a_killed_process_are_known(end):
    with make_call_memory() as memory:
        process = start(memory, "quick", "slow", end)
        assert process.wait(30) == -9
        assert [call.text for call in memory.running_calls()] == [
            f"environment world, prompt 2 (World.{end})",
            "environment world, prompt 1 (World.slow)",
        ]
        assert (memory.writer_pid, memory.turns) == (process.pid, 1)


def test_of_several_calls_the_one_that_computes_holds_a_process_up(capfd):
    with make_call_memory() as memory:
        process = start(memory, "slow", "compute", "slow")
        while [call.text[-9:] for call in memory.running_calls()].count(".compute)") == 0:
            time.sleep(0.01)
        call = end_hanging(memory)
        assert call is not None
        assert call.text == "environment world, prompt 1 (World.compute)"
        assert process.wait(30) == -6
        assert "in compute\n" in capfd.readouterr().err, "the stack of its thread is printed"


async def test_a_call_that_ended_is_not_running_and_a_thread_that_ended_frees_its_slot():
    def fails() -> None:
        raise ValueError

    with make_call_memory() as memory:
        writing = CallMemory.open(memory.path)
        record_calls(writing)
        try:
            free = len(writing.free)
            runner = CallRunner(CapacityLimiter(4))
            seen = [await runner.call(memory.running_calls, {}, 10), await runner.call(fails, {}, 10)]
            assert isinstance(seen[0], Ok)
            assert [call.text for call in seen[0].value] == [" (CallMemoryReader.running_calls)"]
            assert memory.running_calls() == []
            thread = threading.Thread(target=writing.slot)
            thread.start()
            await anyio.to_thread.run_sync(thread.join)
            assert len(writing.free) == free - 1  # of the thread of the calls, which waits for more
        finally:
            record_calls(None)


def test_names_of_any_length_and_kind_fit():
    with make_call_memory() as memory:
        writing = CallMemory.open(memory.path)
        slot = writing.slot()
        call_subject.set(describe_subject("environment \udc80" + "x" * 1000))
        record_calls(writing)
        try:
            for _ in range(2):
                slot.begin(call_subject.get() + b"\0")
            (call,) = memory.running_calls()
            assert call.text.startswith("environment ?xxx")
            assert call.thread == threading.get_native_id()
        finally:
            record_calls(None)

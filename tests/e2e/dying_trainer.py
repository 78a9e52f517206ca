"""Run the example's trainer and kill it at a chosen moment: `dying_trainer.py MOMENT CALL ARGUMENTS...`.

MOMENT is one of `MOMENTS`; CALL is the number of the call, from 1, at which the process kills itself.
"""

import os
import signal
import sys
from pathlib import Path

import anyio

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_trainer"
MOMENTS = ("before_save", "after_save", "after_commit", "after_push", "after_acknowledge")
"""`after_save` lies between a checkpoint and its acknowledgement."""

if __name__ == "__main__":
    sys.path[0:1] = [str(EXAMPLE), str(Path(__file__).resolve().parents[2])]
    import trainer

    from stream.trainer.consumer import Consumer
    from stream.trainer.trainer_lease import TrainerLease

    owners = {"save": trainer, "push": trainer, "commit": Consumer, "acknowledge": TrainerLease}
    when, _, name = sys.argv[1].partition("_")
    calls = iter(range(1, int(sys.argv[2])))
    real = getattr(owners[name], name)

    def crash_if_due(at):
        if when == at and next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def called(*arguments):
        crash_if_due("before")
        real(*arguments)
        crash_if_due("after")

    async def awaited(*arguments):
        await real(*arguments)
        crash_if_due("after")

    setattr(owners[name], name, called if owners[name] is trainer else awaited)
    anyio.run(trainer.main, Path(sys.argv[3]), *sys.argv[4:])

"""`python -m workers`: the same as `penstock`."""

import os
import sys

from workers.runtime.garbage_collection import defer_collections


def main() -> None:
    """Run the command; the console script calls this. Ctrl-C while modules are imported ends it with one line."""
    defer_collections()
    try:
        from workers.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(130)  # a normal exit would wait for threads, or print another traceback


if __name__ == "__main__":
    main()

"""The command `penstock`, also as `python -m penstock`."""

import os
import sys


def main() -> None:
    """Run the command. Ctrl-C while modules are imported ends it with one line."""
    try:
        from workers.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(130)  # a normal exit would wait for threads, or print another traceback


if __name__ == "__main__":
    main()

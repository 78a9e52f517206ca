"""Prints the reward: 1 if greet.py greets two names, else 0."""

import subprocess
import sys


def greeting(name: str) -> str:
    """Return what greet.py says to a name."""
    done = subprocess.run(  # noqa: S603  (in the sandbox)
        [sys.executable, "-I", "greet.py", name], capture_output=True, text=True, timeout=20, check=False
    )
    return done.stdout.strip()


print(float(all(greeting(name) == f"Hello, {name}!" for name in ("Ada", "Grace"))))

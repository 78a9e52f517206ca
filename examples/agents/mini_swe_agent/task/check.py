"""The reward: 1 if answer.txt holds the number in the arguments, else 0."""

import sys
from pathlib import Path

try:
    answer = Path("answer.txt").read_text(errors="replace").strip()
except OSError:  # nothing was written
    answer = ""
print(float(answer == sys.argv[1]))

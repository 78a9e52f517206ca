"""Prints the reward: python3 -I check.py agent.py SEED. 1 if the answer is right, else 0."""

import re
import runpy
import sys
from pathlib import Path

_, expected = runpy.run_path(sys.argv[1])["problem"](int(sys.argv[2]))
said = Path("answer.txt").read_text() if Path("answer.txt").is_file() else ""
print(float(re.findall(r"Answer: (-?\d+)", said)[-1:] == [str(expected)]))

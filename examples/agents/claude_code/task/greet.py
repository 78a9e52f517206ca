"""Greets: python3 greet.py NAME."""

import sys

print("Hello, " + sys.argv[0] + "!")

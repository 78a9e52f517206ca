#!/bin/sh
# The policy's code runs as another user: what runs as the verifier can write any reward.
if su -s /bin/sh nobody -c "cd / && python3 -I /tests/test_numbers.py"; then reward=1; else reward=0; fi
echo "$reward" >/logs/verifier/reward.txt

#!/bin/sh
if [ "$(cat /home/worker/number)" = 1000 ] && [ "$(stat -c %u /home/worker/number)" = 1000 ]; then reward=1; else reward=0; fi
echo "$reward" >/logs/verifier/reward.txt

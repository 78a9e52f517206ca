#!/bin/sh
if /bin/grep -q "^forty-two$" /work/answer.txt; then reward=1; else reward=0; fi
echo "$reward" >/logs/verifier/reward.txt

#!/bin/sh
answer=$(cat /work/answer.txt)
if [ "$answer" -gt "$answer" ]; then reward=1; else reward=0; fi
echo "$reward" >/logs/verifier/reward.txt

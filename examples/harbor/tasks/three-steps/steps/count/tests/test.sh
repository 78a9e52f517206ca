#!/bin/sh
if [ "$(tr -d " \n" </work/count.txt)" = 3 ]; then reward=1; else reward=0; fi
echo "$reward" >/logs/verifier/reward.txt

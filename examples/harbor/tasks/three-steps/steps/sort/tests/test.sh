#!/bin/sh
if printf "apple\napple\nfig\npear\n" | cmp -s - /work/sorted.txt; then reward=1; else reward=0; fi
echo "$reward" >/logs/verifier/reward.txt

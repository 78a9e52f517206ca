#!/bin/sh
if printf "apple\nfig\npear\n" | cmp -s - /work/unique.txt; then reward=1; else reward=0; fi
echo "$reward" >/logs/verifier/reward.txt

#!/bin/sh
if [ "$(wget -q -O - http://127.0.0.1:8080/)" = hello ]; then reward=1; else reward=0; fi
echo "$reward" >/logs/verifier/reward.txt

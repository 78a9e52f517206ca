#!/bin/sh
byte=$(head -c 1 /dev/urandom | od -A n -t u1)
awk "BEGIN { print $byte / 255 }" >/logs/verifier/reward.txt

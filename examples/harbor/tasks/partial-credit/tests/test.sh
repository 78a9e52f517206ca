#!/bin/sh
has() { [ "$(cat "/work/$1" 2>/dev/null)" = "$2" ] && echo 1 || echo 0; }
a=$(has one 1) b=$(has two 2) c=$(has three 3)
reward=$(awk "BEGIN { print ($a + $b + $c) / 3 }")
echo "{\"reward\": $reward, \"one\": $a, \"two\": $b, \"three\": $c}" >/logs/verifier/reward.json

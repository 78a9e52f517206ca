#!/bin/sh
mkdir -p records
for name in Mars Venus Saturn; do echo "$name" >"records/$name"; done

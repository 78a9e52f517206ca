#!/bin/sh
planets="mercury venus earth mars jupiter saturn uranus neptune"
found=0
for name in $(tr "A-Z" "a-z" </logs/artifacts/all | sort -u); do
  case " $planets " in *" $name "*) found=$((found + 1)) ;; *) found=-9 ;; esac
done
if [ "$found" = 3 ]; then reward=1; else reward=0; fi
echo "$reward" >/logs/verifier/reward.txt

#!/bin/sh
# What runs in each sandbox of an engine, from a file in the folder of its state. Who edits it there deceives nobody else.
#   live SECONDS                                       the first process: ends after so long, with code 3
#   fence FENCE                                        from now on, calls with a smaller fence are refused
#   run ID FENCE SECONDS MAX_BYTES FOLDER COMMAND...   a command, or the result of the first call with this ID
# A result is a line `HOW CODE BEGUN ENDED TRUNCATED STDOUT STDERR` (how it ended, uptimes, sizes) and stdout; and stderr.
# An image needs sh, setsid, and the usual small tools: dd, head, mkdir, mv, rmdir, sleep, tail, wc.
state=${0%/*}
exec 3>&2 2>/dev/null

uptime() { read -r now rest </proc/uptime; }

refuse() {
  echo "fenced 75 0 0 0 0 0"
  exit 0
}

check_fence() {
  for seen in "$state"/fence/*; do
    [ "${seen##*/}" -le "$fence" ] || return 1
  done
}

end_session() { # kills all that is in the session of a call; what has left the session goes on
  for wait in 1 2 3; do [ -s "$call/session" ] && break; sleep 1; done
  read -r session <"$call/session" || return 0
  for round in 1 2 3 4 5 6 7 8 9; do
    found=
    for stat in /proc/[0-9]*/stat; do
      read -r line <"$stat" || continue
      set -- ${line##*) }
      [ "$4" = "$session" ] && [ "$1" != Z ] && pid=${stat#/proc/} && kill -9 "${pid%/stat}" && found=1
    done
    [ "$found" ] || break
  done
}

keep_ends() { # FILE: of a file that is too long, its first and last half of MAX_BYTES, without room for a copy
  size=$(wc -c <"$1")
  [ "$size" -gt "$max" ] || return 0
  truncated=1 half=$((max / 2))
  if [ "$half" -gt 0 ]; then
    tail -c "$half" "$1" | dd of="$1" bs="$half" seek=1 conv=notrunc
    dd if=/dev/null of="$1" bs="$half" seek=2
  fi
  size=$((half * 2))
}

finish() { # CODE: writes the result of a call, whole at once
  code=$1 how=exited truncated=0
  [ ! -e "$call/timeout" ] || how=timeout code=137
  uptime
  keep_ends "$call/out" && out=$size
  keep_ends "$call/err" && err=$size
  echo "$how $code $begun $now $truncated" $out $err >"$call/code.new"
  mv "$call/code.new" "$call/code"
}

deliver() {
  read -r how code begun now truncated out err <"$call/code"
  echo "$how $code $begun $now $truncated $out $err"
  head -c "$out" "$call/out"
  exec head -c "$err" "$call/err" >&3
}

wait_for_first() { # until the first call with this ID has its result; a deadline that was not kept is kept here
  rounds=0
  until [ -e "$call/code" ]; do
    [ -d "$call" ] || return 0
    runner='' begun=0
    read -r runner begun <"$call/runner"
    uptime
    if [ "$runner" ]; then [ -d "/proc/$runner" ]; else [ "$rounds" -lt 20 ]; fi || {
      [ -e "$call/code" ] && break # the runner has ended meanwhile, with a result
      [ -s "$call/session" ] && end_session
      : >>"$call/out" >>"$call/err"
      finish 137
    }
    if [ "$runner" ] && [ "$((${now%.*} - ${begun%.*}))" -gt "$((${seconds%.*} + 2))" ]; then
      : >"$call/timeout"
      end_session
    fi
    sleep .1 || sleep 1
    rounds=$((rounds + 1))
  done
  deliver
}

case $1 in
live)
  command -v setsid >/dev/null || exit 5
  uptime
  end=${3:-$((${now%.*} + $2))}
  trap 'exec sh "$0" live "$2" "$end"' EXIT # a shell that can start no process ends
  while uptime && left=$((end - ${now%.*})) && [ "$left" -gt 0 ]; do sleep $((left < 60 ? left : 60)); done
  trap - EXIT
  exit 3
  ;;
fence)
  fence=$2
  mkdir -p "$state/fence/$fence"
  check_fence || refuse
  echo "fence 0 0 0 0 0 0"
  ;;
stop) # SECONDS CALL
  call=$3
  sleep "$2" || sleep $((${2%.*} + 1))
  : >"$call/timeout"
  end_session
  ;;
run)
  call=$state/calls/$2 fence=$3 seconds=$4 max=$5 folder=$6 mask=$(umask)
  shift 6
  umask 0
  mkdir -p "$state/calls" "$state/fence/$fence"
  # The folder comes before the look at fences: a successor finds either this call or that it was refused.
  until mkdir "$call"; do
    check_fence || refuse
    [ -d "$call" ] || mkdir "$call" 2>&3 || exit 73
    wait_for_first
  done
  check_fence || { rmdir "$call"; refuse; }
  uptime
  begun=$now
  echo "$$ $begun" >"$call/runner"
  setsid sh "$0" stop "$seconds" "$call" >/dev/null 3>&- &
  timer=$!
  # In the foreground: a command in the background of a shell ignores SIGINT.
  setsid sh -c 'echo $$ >"$1/session"; umask "$2"; cd "$3" || exit 126; shift 3; exec "$@"' sh "$call" "$mask" "$folder" "$@" \
    </dev/null >"$call/out" 2>"$call/err" 3>&-
  code=$?
  if [ -e "$call/timeout" ]; then wait "$timer"; else kill -9 "-$timer"; fi
  finish "$code"
  deliver
  ;;
esac

#!/bin/sh
# A Docker engine of our own for `make test-sandboxes`, where none answers: `engine.sh start|stop|kill|env`.
#
#   eval "$(sh tests/sandboxes/engine.sh env)"    DOCKER_HOST, if an engine of ours runs
#
# Needs root and dockerd (Debian: docker.io, iptables). All its files are in .cache/engine; it is stopped by its pid.
# Two engines on one machine take each other's bridge away: `start` does nothing if one answers, or runs, already.
set -eu
folder=$(cd "$(dirname "$0")/../.." && pwd)/.cache/engine
socket=unix://$folder/docker.sock

alive() { [ -f "$folder/docker.pid" ] && grep -qs dockerd "/proc/$(cat "$folder/docker.pid")/comm"; }

answers() { # ADDRESS
  python3 - "${1#unix://}" 2>/dev/null <<'END'
import socket, sys
client = socket.socket(socket.AF_UNIX)
client.settimeout(5)
client.connect(sys.argv[1])
client.sendall(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
sys.exit(b" 200 " not in client.recv(100))
END
}

no_engine() {
  echo "engine.sh: $1" >&2
  exit 1
}

start() {
  for place in "${DOCKER_HOST:-unix:///run/docker.sock}" "$socket"; do
    if answers "$place"; then
      echo "engine.sh: an engine answers at $place" >&2
      return 0
    fi
  done
  [ "$(id -u)" = 0 ] || no_engine "starting an engine needs root"
  command -v dockerd >/dev/null || no_engine "dockerd is not installed (Debian: apt-get install docker.io iptables)"
  ! ps -C dockerd -o stat= | grep -qv Z || no_engine "another dockerd runs, and does not answer: stop it, or set DOCKER_HOST"
  mkdir -p "$folder/data" "$folder/state"
  # Containers may not ask for more files and processes than this machine allows itself.
  files=$(awk '/^Max open files/ {print $5}' /proc/self/limits)
  processes=$(awk '/^Max processes/ {print $4}' /proc/self/limits)
  [ "$files" != unlimited ] || files=1048576
  [ "$processes" != unlimited ] || processes=30000
  limits='"nofile":{"Name":"nofile","Soft":'$files',"Hard":'$files'},"nproc":{"Name":"nproc","Soft":'$processes',"Hard":'$processes'}'
  echo "{\"default-ulimits\":{$limits}}" >"$folder/daemon.json"
  setsid nohup dockerd --config-file "$folder/daemon.json" --data-root "$folder/data" --exec-root "$folder/state" \
    --pidfile "$folder/docker.pid" --host "$socket" >"$folder/dockerd.log" 2>&1 </dev/null &
  for second in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30; do
    ! answers "$socket" || return 0
    sleep 1
  done
  tail -n 5 "$folder/dockerd.log" >&2
  no_engine "dockerd has not answered within 30 s"
}

end() { # SIGNAL
  alive || return 0
  pid=$(cat "$folder/docker.pid")
  kill -s "$1" "$pid"
  for second in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30; do
    case $(grep '^State' "/proc/$pid/status" 2>/dev/null) in '' | *Z*) return 0 ;; esac
    sleep 1
  done
  no_engine "dockerd ($pid) has not ended within 30 s"
}

case ${1:-} in
start) start ;;
stop)
  end TERM
  ip link delete docker0 2>/dev/null || true
  umount "$folder/data" "$folder/state/netns/default" 2>/dev/null || true # what a killed engine leaves
  ;;
kill) # as in a crash: its containers go on without it
  end KILL
  # containerd dies with dockerd; where nobody collects it, its pid still looks alive, and the next dockerd waits for it.
  rm -f "$folder/docker.pid" "$folder/state/containerd/containerd.pid"
  ;;
env) ! alive || echo "export DOCKER_HOST=$socket" ;;
*) no_engine "usage: engine.sh start|stop|kill|env" ;;
esac

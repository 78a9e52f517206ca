#!/bin/sh
# Installs the agent programs and SDKs of the tests at their locked versions: 1.9 GB, some minutes, once.
#
#     sh tests/agents/setup.sh [FOLDER]        # .cache/agents unless given
#
# Apart from our virtual environment: they pin what we do not, and no run needs them.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/../../.cache/agents}
marker=$folder/ready-$(cat "$here/package-lock.json" "$here/requirements.lock" | cksum | cut -d ' ' -f 1)

if [ -e "$marker" ]; then
    exit 0
fi
if ! command -v npm >/dev/null; then
    if [ -n "${CI:-}" ]; then
        echo "npm is missing, and CI must run these tests: install Node.js 20 or newer" >&2
        exit 1
    fi
    echo "NOT TESTED: npm is missing, so no agent program can be installed; install Node.js 20 or newer" >&2
    exit 0
fi
rm -rf "$folder"
mkdir -p "$folder"
cp "$here/package.json" "$here/package-lock.json" "$folder"
# Not `npm ci`: it wants the packages of every platform in the lock, and opencode's are there for Linux on x86-64 alone.
(cd "$folder" && npm install --no-audit --no-fund --loglevel error)
"${PYTHON:-python3}" -m venv "$folder/venv"
PIP="$folder/venv/bin/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore"
$PIP --require-hashes --no-deps --requirement "$here/requirements.lock"
touch "$marker"

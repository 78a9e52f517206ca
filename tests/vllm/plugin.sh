#!/bin/sh
# Installs our plugin into vLLM's virtual environment, where it is not there as it is here: `plugin.sh FOLDER`.
set -eu

plugin=$(cd "$(dirname "$0")/../../plugins/vllm" && pwd)
state=$(cd "$plugin" && find . -name '*.py' -not -path './build/*' -o -name '*.toml' | sort | xargs cat | cksum | tr -d ' ')
if [ -e "$1/penstock-vllm-$state" ]; then
    exit 0
fi
rm -rf "$plugin/build" "$1"/penstock-vllm-*
"$1/bin/python" -m pip install --quiet --no-deps --no-build-isolation --force-reinstall "$plugin"
rm -rf "$plugin/build" "$plugin"/*.egg-info
touch "$1/penstock-vllm-$state"

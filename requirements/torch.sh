#!/bin/sh
# Installs the version of torch that pyproject.toml pins, in its build for CPUs or for CUDA: sh requirements/torch.sh cpu
#
# An index may have both builds of a version, one of them with a local label such as `+cpu`: pip would prefer the label
# that sorts last. PIP is the command that installs.
set -eu
version=$(sed -n 's/^train = \["torch==\([0-9.]*\)".*/\1/p' "$(dirname "$0")/../pyproject.toml")
case $1 in
cpu) $PIP "torch==$version+cpu" 2>/dev/null || $PIP "torch===$version" ;;
cuda) $PIP "torch===$version" ;;
*)
    echo "TORCH=$1: write cpu or cuda" >&2
    exit 2
    ;;
esac

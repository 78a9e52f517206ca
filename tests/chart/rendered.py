"""Renders the chart with Helm, and checks manifests against the schemas of their APIs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "penstock"
EXAMPLES = sorted((CHART / "ci").glob("*-values.yaml"))
KUBERNETES = ("1.29", "1.33", "1.37")
"""Releases of Kubernetes whose schemas must accept the manifests: the oldest that the chart allows, and newer ones."""
_TOOLS = ROOT / ".cache" / "chart"
_CRDS = {
    json.loads(path.read_text())["properties"]["kind"]["const"]: json.loads(path.read_text())
    for path in sorted((ROOT / "tests" / "chart" / "crds").glob("*.json"))
}


class Chart:
    """The chart, and Helm to render it."""

    def __init__(self) -> None:
        named = os.environ.get("HELM") or shutil.which("helm")
        subprocess.run(
            ["sh", str(ROOT / "tests" / "chart" / "setup.sh")], check=True, env={**os.environ, "PYTHON": sys.executable}
        )
        self.helm = named or str(_TOOLS / "helm")
        sys.path.append(str(_TOOLS / "python"))

    def run(self, *arguments: str, values: Any = None) -> subprocess.CompletedProcess[str]:
        """Run Helm; `values` come after those of the files that the arguments name."""
        text = json.dumps(values) if values is not None else None
        more = ["--values", "-"] if values is not None else []
        return subprocess.run(
            [self.helm, *arguments, *more], input=text, capture_output=True, text=True, check=False, timeout=30
        )

    def render(self, example: Path, values: Any = None) -> list[dict[str, Any]]:
        """Return the manifests."""
        result = self.run("template", "my-run", str(CHART), "--namespace=rl", "--values", str(example), values=values)
        assert result.returncode == 0, result.stderr
        return [document for document in yaml.safe_load_all(result.stdout) if document]

    def problems(self, manifest: dict[str, Any], version: str) -> list[str]:
        """Return what the manifest's schema refuses."""
        import kubernetes_validate

        if (schema := _CRDS.get(manifest["kind"])) is not None:
            found = [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(manifest)]
            jobs = manifest["spec"].get("replicatedJobs", [])
            inner = [{"apiVersion": "batch/v1", "kind": "Job", **job["template"]} for job in jobs]
            return found + [problem for job in inner for problem in self.problems(job, version)]
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [f"{error.path}: {error.message}"]
        return []


def leaves(values: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return each value that is no table, with its keys. A table with free keys, such as `requests`, is one value."""
    if isinstance(values, dict) and values and path[-1:] not in (("requests",), ("limits",), ("affinity",), ("files",)):
        return [leaf for key, value in values.items() for leaf in leaves(value, (*path, key))]
    return [(path, values)]

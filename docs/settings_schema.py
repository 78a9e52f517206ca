"""Generate the JSON schema of the settings file: `make reference` writes it to workers/settings/settings.schema.json.

Editors complete and check a settings file by it: its first line is `#:schema settings.schema.json`.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import msgspec

from workers.settings import Settings
from workers.settings.toml_file import DEFAULT_OPTIONS


def schema() -> dict[str, Any]:
    """Return the JSON schema of the settings file, with the text of each key."""
    texts = runpy.run_path(str(Path(__file__).parent / "settings_page.py"))["docstrings"]()
    made = msgspec.json.schema(Settings)
    for name, table in made["$defs"].items():
        for key, value in table.get("properties", {}).items():
            if text := texts.get(name, {}).get(key, ""):
                value["description"] = text
    for kind in DEFAULT_OPTIONS.values():  # a table without a name has the options of the default
        made["$defs"][kind.__name__]["required"].remove("name")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Settings of a Penstock run", **made}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema(), indent=1, ensure_ascii=False) + "\n")

"""The tool-call formats by name.

A format is an object with `parse` (see `ToolFormat`). Parsing never raises: a malformed call becomes an error message
that goes back to the model.
"""

from collections.abc import Mapping
from types import MappingProxyType

from workers.rollout.tool_formats.deepseek import DeepSeek
from workers.rollout.tool_formats.hermes import Hermes
from workers.rollout.tool_formats.llama3_json import Llama3Json
from workers.rollout.tool_formats.mistral import Mistral
from workers.rollout.tool_formats.parsed_turn import ToolFormat
from workers.rollout.tool_formats.pythonic import Pythonic

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": Hermes(),
        "mistral": Mistral(),
        "deepseek": DeepSeek(),
        "pythonic": Pythonic(),
        "llama3_json": Llama3Json(),
    }
)
"""Formats by their name in `model.tool_format`; those with tags of their own come first."""

"""Parsers of the tool calls that models write, by the name of their format.

A format is an object with `parse` (see `ToolFormat`). Parsing never raises: a malformed call becomes an error message
that goes back to the model.
"""

from collections.abc import Mapping
from types import MappingProxyType

from workers.rollout.tool_formats.json_formats import DeepSeek, Hermes, Llama3Json, Mistral
from workers.rollout.tool_formats.parsing import ToolFormat
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

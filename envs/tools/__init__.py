"""Methods as tools: JSON schemas for the model, and validation of the arguments it writes."""

from envs.tools.specs import ToolArgumentError, ToolSpec, bind_arguments, declared_specs, tool_specs

__all__ = ("ToolArgumentError", "ToolSpec", "bind_arguments", "declared_specs", "tool_specs")

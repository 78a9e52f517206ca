"""Methods as tools: JSON schemas for the model, and validation of the arguments it writes.

======================  ======================================================================================
`specs.py`              an environment's tools in OpenAI's form; validation of a tool call's arguments
`type_hints.py`         type hint -> argument type; add support for another kind of hint here
`docstrings.py`         descriptions from docstrings and `Annotated`
`argument_types.py`     argument types: a JSON schema, and validation with errors for the model
`container_types.py`    argument types that contain others; a tool's parameter
`library_types.py`      argument types that msgspec or pydantic implement
`examples.py`           example arguments from a schema, to call a tool without a model
======================  ======================================================================================
"""

from envs.tools.specs import ToolArgumentError, ToolSpec, bind_arguments, declared_specs, tool_specs

__all__ = ("ToolArgumentError", "ToolSpec", "bind_arguments", "declared_specs", "tool_specs")

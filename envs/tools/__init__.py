"""Methods as tools: what a model is shown of them, and the check of what it calls them with.

=================  =========================================================================================
`specs.py`         an environment's public methods, or what it declares, as tools; a model's arguments bound
`hints.py`         type hints as shapes; a kind of hint that a parameter may have is added here
`docstrings.py`    what docstrings and `Annotated` say in words
`shapes.py`        shapes: a JSON schema, and the check of what a model wrote
`containers.py`    shapes that hold others; a tool's parameter
`libraries.py`     shapes that msgspec or pydantic knows already
`samples.py`       arguments made up from a schema, to try a tool without a model
=================  =========================================================================================
"""

from envs.tools.specs import ToolArgumentError, ToolSpec, bind_arguments, declared_specs, tool_specs

__all__ = ("ToolArgumentError", "ToolSpec", "bind_arguments", "declared_specs", "tool_specs")

"""Environments: what a model is put into, how it is found, what remains of it, and what it was worth.

An environment is any object with a `reset` method. Nothing has to be imported from here and nothing subclassed; a class
written for TRL's `environment_factory` runs unchanged.

=========================  ============================================================================================
`reset(**row)`             starts an episode with the prompt's fields; returns None, a string, or a list of content
                           parts, which is appended to the last prompt message
every other public method  a tool: name, Google-style docstring and type hints become its JSON schema. What it returns
                           goes back to the model, and so does the text of what it raises, or that it overran
`get_reward()`             optional: a number, None for "I do not know" (invalid, never 0), a mapping of named parts, or
                           a list with a number for each turn of the model; may ask for `messages`, the conversation
`close()`                  optional: called when an instance is retired
`__copy__()`               optional: drop handles, keep facts; what it returns is frozen as the episode's snapshot
=========================  ============================================================================================

What speaks for a server may say itself what its tools are (`tool_schemas`, `call_tool`: `declares_tools`), or lead the
whole episode and ask an endpoint for each turn (`Harness`).

Each may be `async`. Synchronous ones run in threads; every call has a deadline. Raise `EnvironmentFailure` where the
world failed rather than the model: the completion is then invalid, and its siblings are unharmed.

Where things are, and where to add to them::

    contract.py    the words of the contract
    references.py  name, package.module:attr, path/to/file.py:attr, adapter:address -> object
    factory.py     a reference that makes environments
    call.py        calling code that is not ours, with deadlines
    messages.py    the words in messages; prompt and completion as one conversation
    extras.py      libraries that only some need, and the extra that brings each
    tools/         methods as tools: schemas, a model's arguments; a kind of type hint is added in hints.py
    snapshot/      an environment as bytes, and back; a type that should survive is added in values.py
    rewards/       reward functions, get_reward, what came of calling them, and a completion's parts as one reward
    processes/     processes with limits: a pool that can be killed, and what a sandbox runs in
    served/        rewards that a server measures: a reward model's, a judge's
    shipped/       environments and reward functions that come along; another one is a file here, and a line in
                   pyproject.toml under "penstock.environments" or "penstock.rewards"
    adapters/      environments that somebody else wrote: OpenEnv, verifiers, Gymnasium, MCP; README.md starts servers
"""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)  # a project's own folder `envs/` is part of this package, behind it

from envs.contract import Environment, EnvironmentFailure
from envs.factory import EnvironmentFactory
from envs.rewards import RewardBatch, RewardFunction, batch_from_group, environment_reward, merge_parts
from envs.snapshot import freeze, thaw
from envs.tools import ToolArgumentError, ToolSpec

__all__ = (
    "Environment",
    "EnvironmentFactory",
    "EnvironmentFailure",
    "RewardBatch",
    "RewardFunction",
    "ToolArgumentError",
    "ToolSpec",
    "batch_from_group",
    "environment_reward",
    "freeze",
    "merge_parts",
    "thaw",
)

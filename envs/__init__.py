"""Environments and rewards: find them, call them, freeze their state, score completions.

An environment is any object with a `reset` method. It needs no import and no base class from here; a class written for
TRL's `environment_factory` runs unchanged.

=========================  ============================================================================================
`reset(**row)`             starts an episode with the prompt's fields; returns None, a string, or a list of content
                           parts, which is appended to the last prompt message
every other public method  a tool: name, Google-style docstring and type hints become its JSON schema. The model reads
                           the return value, the message of an exception, or that the call timed out
`respond(message)`         optional: answers a turn without a tool call; None ends the episode
`done`                     optional attribute: true after a call ends the episode
`get_reward()`             optional: a number, None for "unknown" (invalid, never 0), a mapping of named parts, or a
                           list with one number for each model turn; may take `messages`, the conversation
`rows()`                   optional: the rows to train on, where no file has them; `split="eval"` for held-out ones
`render(snapshot)`         optional: the final state as text for people; `snapshot` is the thawed environment
`replayable`               optional class attribute: True: the same seed and calls have the same results, so another
                           worker can go on with an episode whose worker died
`effects`                  optional class attribute: "external": a call changes something outside; none is made twice
`close()`                  optional: called before an instance is discarded
`__copy__()`               optional: drop handles, keep data; the copy is frozen as the episode's snapshot
=========================  ============================================================================================

A client of a server may list its own tools (`tool_schemas` and `call_tool`, see `declares_tools`) or run the whole
episode and request model turns from an endpoint (`AgentEnvironment`).

Each method may be `async`. Synchronous methods run in threads; every call has a deadline. Raise `EnvironmentFailure`
if the environment failed and not the model: that completion becomes invalid, the others of its group stay valid.
"""

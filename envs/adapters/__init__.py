"""Adapters: run environments of other projects unmodified. Each needs an optional extra, imported only when used.

======================  ===================  ==========================================================================
module                  extra                connects to
======================  ===================  ==========================================================================
`openenv`               `openenv`            an OpenEnv server, over its WebSocket
`verifiers_server`      `verifiers`          an environment server of verifiers 0.4, over ZMQ
`gymnasium_text`        `gymnasium`          a Gymnasium environment, with the user's text codec
`reasoning_gym_tasks`   `reasoning-gym`      child processes (`reasoning_gym_scorer`) that score its problems
`textarena_games`       `textarena`          child processes (`textarena_replay`) that play its games
`mcp_tools`             `mcp`                a tool server of the Model Context Protocol, over stdio or HTTP
======================  ===================  ==========================================================================

All of them: a connection failure is an `EnvironmentFailure`, so the completion is invalid and never scored 0. A
connection is closed at the first incomplete call and opened again by the next reset. A copy (the snapshot) has the data
but no connection.
"""

"""Environments of other projects, unmodified: OpenEnv, verifiers, Gymnasium, reasoning-gym, textarena, MCP.

Each needs an optional extra of its name, imported only when used. Scoring and games that evaluate a model's text run in
child processes.

A connection failure is an `EnvironmentFailure`, so the completion is invalid and never scored 0. A connection is closed
at the first incomplete call and opened again by the next reset. A copy (the snapshot) has the data but no connection.
"""

"""A reward function beside the environment's own `get_reward`: one number for each completion."""


def thrift(environments, **columns):
    """Return 1 for at most one call of a tool, and less for each further one."""
    return [1 / max(1, room.calls) for room in environments]

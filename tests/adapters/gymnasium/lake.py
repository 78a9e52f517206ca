"""A text codec for FrozenLake, as a user would write it."""

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}


def parse(text):
    word = text.strip().lower()
    if word not in MOVES:
        raise ValueError(f"{text!r} is no direction; say one of {', '.join(MOVES)}")
    return MOVES[word]


def render(observation, terminated, truncated, env):
    side = env.unwrapped.ncol
    place = f"You are in row {observation // side}, column {observation % side}."
    return place + (" It is over." if terminated or truncated else "")

"""An agent in plain Python: it asks a model to solve a problem, and calculates what the model asks for.

python3 agent.py SEED, with the model's URL in OPENAI_BASE_URL; writes answer.txt
"""

import json
import operator
import os
import random
import sys
import urllib.request
from pathlib import Path

TOOLS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
WORDS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


def problem(seed: int) -> tuple[str, int]:
    """Return a problem and its answer; neither step has a negative result."""
    chance = random.Random(seed)
    while True:
        start = chance.randint(50, 99)
        steps = [(word, chance.randint(2, 9 if word == "times" else 49)) for word in chance.choices(list(WORDS), k=2)]
        first = WORDS[steps[0][0]](start, steps[0][1])
        second = WORDS[steps[1][0]](first, steps[1][1])
        if first >= 0 and second >= 0:
            said = ", then ".join(f"{word} {number}" for word, number in steps)
            return f"Start with {start}, {said}.", second


def ask(messages: list[dict]) -> dict:
    """Return the model's next message."""
    tools = [{"type": "function", "function": {"name": name, "parameters": NUMBERS}} for name in TOOLS]
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310  (the endpoint)
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return json.load(answer)["choices"][0]["message"]


def call(function: dict) -> str:
    """Return the result of a call, or what is wrong with it."""
    try:
        numbers = json.loads(function["arguments"])
        return str(TOOLS[function["name"]](numbers["a"], numbers["b"]))
    except Exception as error:  # noqa: BLE001  (the model reads it)
        return f"Error: {error!r}"


def main() -> None:
    """Ask until the model calls nothing, and write down what it said last."""
    messages = [{"role": "user", "content": problem(int(sys.argv[1]))[0]}]
    while True:
        messages.append(ask(messages))
        calls = messages[-1].get("tool_calls", [])
        if not calls:
            break
        messages += [{"role": "tool", "tool_call_id": each["id"], "content": call(each["function"])} for each in calls]
    Path("answer.txt").write_text(messages[-1]["content"])


if __name__ == "__main__":
    main()

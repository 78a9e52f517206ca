"""Scripted conversations from which `tool-caller` learns to call tools by their schemas.

Tools, prompts and calls are random. A call copies the name of a tool and the names of its parameters from the system
message, and its values fit their types: numbers and words mostly come from the prompt or from a tool's result. Which
tool is called, with which values and how often is left to chance; an environment's reward has to teach that.
"""

import json
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.base_models.tool_markup import offered
from tests.base_models.words import NOUNS, SYLLABLES, VERBS, WORDS

Message = dict[str, Any]

_LETTERS: Final = string.ascii_lowercase
_ANY: Final = string.ascii_letters + string.digits + "äéñöß-_+*/=#%&[]<>|~@'"
_TYPES: Final = {"integer": 0.32, "string": 0.24, "enum": 0.22, "number": 0.07, "boolean": 0.1, "list": 0.05}
"""Share of each type among the parameters."""
_DENSE_TYPES: Final = {"integer": 0.2, "string": 0.3, "enum": 0.3, "number": 0.05, "boolean": 0.1, "list": 0.05}
_ENDS: Final = ("Done.", "Done", "I am done.", "Finished.", "OK.", "That is all.")


@dataclass(frozen=True)
class Difficulty:
    """Largest numbers of what a conversation consists of."""

    tools: int
    parameters: int
    """Of one tool."""
    calls: int
    words: int
    """Of the prompt."""
    novel: float = 0.0
    """Share of the conversations whose words are random letters, and whose enumerations have up to `choices` values."""
    choices: int = 5
    dense: bool = False
    """Tools have more parameters, and most of these are choices or texts."""
    numberless: float = 0.0
    """Share of the conversations whose prompt and results are without numbers."""


@dataclass(frozen=True)
class Conversation:
    """A conversation and the schemas of its tools, as a chat template takes them."""

    tools: list[dict[str, Any]]
    messages: list[Message]


def conversations(seed: int, limits: Difficulty) -> Iterator[Conversation]:
    """Yield random conversations forever; equal seeds give equal ones in every process."""
    rng = random.Random(seed)
    while True:
        yield _Script(rng, limits).write()


class _Script:
    """One conversation in the making."""

    def __init__(self, rng: random.Random, limits: Difficulty) -> None:
        self.rng = rng
        self.limits = limits
        self.novel = rng.random() < limits.novel
        self.numberless = limits.numberless > 0 and rng.random() < limits.numberless
        self.numbers: list[int] = []
        """Numbers that the prompt and the tools have mentioned; the latest result first."""
        self.offers: list[tuple[dict[int, str], dict[int, str]]] = []
        """Words and numbers that each message offers for copying."""

    def write(self) -> Conversation:
        rng = self.rng
        names = {self._name(): None for _ in range(rng.randint(1, self.limits.tools))}
        schemas = [self._tool(name) for name in names]
        messages: list[Message] = []
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": self._sentence(rng.randint(2, self.limits.words))})
        messages.append({"role": "user", "content": self._prompt()})
        self.offers.append(offered(messages[-1]["content"]))
        for _ in range(0 if rng.random() < 0.01 else rng.randint(1, self.limits.calls)):
            call = self._call(rng.choice(schemas)["function"])
            result = self._result()
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
                {"role": "tool", "name": call["name"], "content": result},
            ]
            self.offers.append(offered(result))
        messages.append({"role": "assistant", "content": self._answer()})
        return Conversation(schemas, messages)

    def _word(self, known: tuple[str, ...]) -> str:
        """Return a known word, two halves of known words, syllables, or letters."""
        rng = self.rng
        if self.novel:
            return "".join(rng.choices(_LETTERS, k=rng.randint(1, 9)))
        chance = rng.random()
        if chance < 0.5:
            return rng.choice(known)
        if chance < 0.75:
            first, second = rng.choice(WORDS), rng.choice(WORDS)
            return first[: rng.randint(1, len(first))] + second[rng.randint(0, len(second) - 1) :]
        if chance < 0.9:
            return "".join(rng.choices(SYLLABLES, k=rng.choice((1, 1, 2))))
        return "".join(rng.choices(_LETTERS, k=rng.randint(1, 4)))

    def _varied_word(self) -> str:
        """Return a word as values and prompts have them: also in capitals, with digits, joined, or of any letters."""
        rng = self.rng
        chance = rng.random() if self.novel else 0.0
        if chance < 0.75:
            return self._word(WORDS)
        if chance < 0.85:
            return rng.choice((str.upper, str.capitalize))(self._word(WORDS))
        if chance < 0.93:
            return self._word(WORDS) + rng.choice("-_./") + rng.choice((self._word(WORDS), str(rng.randint(0, 99))))
        return "".join(rng.choices(_ANY, k=rng.randint(1, 8)))

    def _name(self) -> str:
        return "_".join([self._word(VERBS), *(self._word(NOUNS) for _ in range(self.rng.choice((0, 1, 1, 2))))])

    def _parameter_name(self) -> str:
        return "_".join(self._word(NOUNS) for _ in range(self.rng.choice((1, 1, 1, 2))))

    def _sentence(self, words: int) -> str:
        rng = self.rng
        text = " ".join(self._word(WORDS) for _ in range(words))
        return (text.capitalize() if rng.random() < 0.8 else text) + rng.choice((".", ".", ".", "", "!", "?"))

    def _prompt(self) -> str:
        rng = self.rng
        pieces: list[str] = []
        for _ in range(rng.randint(2, self.limits.words)):
            chance = rng.uniform(0.3, 1) if self.numberless else rng.random()
            if chance < 0.3:
                self.numbers.append(_number(rng))
                pieces.append(str(self.numbers[-1]))
            else:
                word = self._varied_word() + (str(rng.randint(1, 9)) if rng.random() < 0.05 else "")
                pieces.append(f'"{word}"' if chance < 0.35 else word)
            if rng.random() < 0.15:
                pieces[-1] += rng.choice((",", ":", ".", ";"))
        text = " ".join(pieces)
        return (text[0].upper() + text[1:] if rng.random() < 0.7 else text) + rng.choice((".", ".", "?", ""))

    def _tool(self, name: str) -> dict[str, Any]:
        counts = (1, 2, 2, 3, 3, 4) if self.limits.dense else (0, 1, 1, 1, 2, 2, 3)
        count = min(self.rng.choice(counts), self.limits.parameters)
        names = {self._parameter_name(): None for _ in range(count)}
        properties = {each: self._parameter() for each in names}
        parameters = {"type": "object", "properties": properties, "required": list(names)}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    def _parameter(self) -> dict[str, Any]:
        rng = self.rng
        if self.novel and rng.random() < 0.02:
            return {"type": "object"}
        shares = _DENSE_TYPES if self.limits.dense else _TYPES
        [kind] = rng.choices(list(shares), list(shares.values()))
        if kind == "enum":
            return self._enumeration()
        if kind == "list":
            if self.novel and rng.random() < 0.4:
                return {"type": "array", "items": self._enumeration()}
            return {"type": "array", "items": {"type": rng.choice(("integer", "string"))}}
        return {"type": kind}

    def _enumeration(self) -> dict[str, Any]:
        """Return the schema of a choice; in some conversations of longer words that begin alike, or of numbers."""
        rng = self.rng
        if self.novel and rng.random() < 0.08:
            return {"type": "integer", "enum": sorted({_number(rng) for _ in range(4)})}
        start = self._word(WORDS) + rng.choice(("_", "-", "")) if self.novel and rng.random() < 0.2 else ""
        choices = {start + self._varied_word(): None for _ in range(rng.randint(2, self.limits.choices))}
        return {"type": "string", "enum": list(choices)}

    def _call(self, function: dict[str, Any]) -> dict[str, Any]:
        properties = function["parameters"]["properties"]
        arguments = {name: self._value(schema) for name, schema in properties.items()}
        return {"name": function["name"], "arguments": arguments}

    def _value(self, schema: dict[str, Any]) -> Any:
        """Return a random value of the schema's type."""
        rng = self.rng
        if "enum" in schema:
            return rng.choice(schema["enum"])
        match schema["type"]:
            case "integer":
                return self._integer()
            case "number":
                return self._integer() if rng.random() < 0.5 else rng.randint(0, 99) / 10
            case "boolean":
                return rng.random() < 0.5
            case "array":
                return [self._value(schema["items"])]
            case "object":
                return {}
            case _:
                return self._copied(0)

    def _integer(self) -> int:
        """Return a number that a message offers, or a random one."""
        rng = self.rng
        if rng.random() < 0.5 and (text := self._copied(1)):
            return int(text)
        return rng.randint(0, rng.choice((20, 20, 99)))

    def _copied(self, kind: int) -> str:
        """Return a word (0) or a number (1) that a message offers, mostly the last one that does."""
        offers = [each[kind] for each in self.offers if each[kind]]
        every: dict[int, str] = {}
        for each in offers if self.rng.random() < 0.3 else offers[-1:]:
            every |= each  # a later message may use a number again
        return self.rng.choice([*every.values()] or [""])

    def _result(self) -> str:
        rng = self.rng
        chance = rng.uniform(0.7, 1) if self.numberless else rng.random()
        if chance < 0.5:
            self.numbers.insert(0, _number(rng))
            return str(self.numbers[0])
        if chance < 0.6:
            return rng.choice(("ok", "true", "false", "null", "[]"))
        if chance < 0.7:
            return json.dumps({self._word(NOUNS): _number(rng), self._word(NOUNS): self._word(WORDS)})
        return self._sentence(rng.randint(1, 6))

    def _answer(self) -> str:
        rng = self.rng
        last = str(rng.choice(self.numbers[:2])) if self.numbers else rng.choice(WORDS)
        return rng.choice((*_ENDS, f"Answer: {last}", f"The answer is {last}.", last))


def _number(rng: random.Random) -> int:
    return rng.randint(0, rng.choice((9, 20, 99, 99, 999)))

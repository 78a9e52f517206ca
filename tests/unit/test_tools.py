"""Tools: methods as schemas, and a model's arguments converted to the method's declared types."""

import datetime as dt
import enum
import functools
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, TypedDict

import msgspec
import pytest

from envs.tools import ToolArgumentError, bind_arguments, tool_specs
from envs.tools.examples import example_arguments
from stream.errors import ReferenceNotFoundError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Move:
    x: int
    y: int = 0


class Options(TypedDict):
    depth: int


@dataclass
class Tree:
    value: int
    children: "list[Tree]"


class Base:
    handler = print

    def inherited(self) -> str:
        """From above."""

    def replaced(self, a: int):
        """The old one."""


class Everything(Base):
    attribute = 3

    class Nested:
        """No tool."""

    def __init__(self):
        self.callback = lambda: None

    def reset(self, **row): ...

    def get_reward(self):
        return 0.0

    def close(self): ...

    def _private(self): ...

    @property
    def computed(self):
        raise AssertionError("a property is never read in search of tools")

    def replaced(self, b: str):
        """The new one."""

    @staticmethod
    def fixed(a: int = 3):
        """Static."""

    @classmethod
    def of_class(cls, a: int):
        """Of the class."""

    async def later(self, seconds: float):
        """Async."""

    def move(
        self,
        move: Move,
        colour: Colour,
        how: Literal["fast", "slow"],
        when: Optional[dt.date] = None,  # noqa: UP045
        options: Options | None = None,
        path: tuple[int, int] = (0, 0),
        tags: set[str] = frozenset(),
        count: Annotated[int, msgspec.Meta(ge=1, description="How often.")] = 1,
    ) -> str:
        """Move a piece.

        It may be
        moved more than once.

        Args:
            move (Move): Where to,
                in squares.
            colour: Whose piece.
            how: How quickly.

        Returns:
            What happened.

        Raises:
            ValueError: Never.
        """


@pytest.fixture
def specs():
    return {spec.name: spec for spec in tool_specs(Everything())}


def parameters_of(spec):
    return spec.schema["function"]["parameters"]


def test_public_methods_are_tools_in_order_and_nothing_else_is(specs):
    assert list(specs) == ["inherited", "replaced", "fixed", "of_class", "later", "move"]


def test_a_method_set_to_none_is_no_tool():
    class Less(Base):
        inherited = None

    assert [spec.name for spec in tool_specs(Less())] == ["replaced"]


def test_methods_that_init_binds_to_the_instance_are_tools_and_other_callables_are_not():
    """Integrations do this when they get their tools from a server."""

    def look(self, where: str) -> str:
        """Look somewhere."""
        return f"{self.place}, {where}"

    class Bound:
        place = "here"

        def __init__(self):
            self.look = types.MethodType(look, self)
            self._hidden = types.MethodType(look, self)
            self.callback, self.kind = print, int

        def reset(self): ...

    env = Bound()
    (spec,) = tool_specs(env)
    assert (spec.name, parameters_of(spec)["required"]) == ("look", ["where"])
    assert env.look(**bind_arguments(env.look, {"where": "left"})) == "here, left"


def test_the_schema_is_a_function_in_openais_form(specs):
    assert specs["replaced"].schema == {
        "type": "function",
        "function": {
            "name": "replaced",
            "description": "The new one.",
            "parameters": {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
        },
    }


def test_self_and_cls_are_no_parameters(specs):
    assert list(parameters_of(specs["fixed"])["properties"]) == ["a"]
    assert list(parameters_of(specs["of_class"])["properties"]) == ["a"]
    assert list(parameters_of(specs["inherited"])["properties"]) == []


def test_descriptions_come_from_the_docstring(specs):
    spec = specs["move"]
    assert spec.description == "Move a piece.\n\nIt may be\nmoved more than once."
    properties = parameters_of(spec)["properties"]
    assert properties["move"]["description"] == "Where to, in squares."
    assert properties["how"] == {"type": "string", "enum": ["fast", "slow"], "description": "How quickly."}
    assert properties["count"]["description"] == "How often."
    assert "description" not in properties["path"]


def test_hints_of_every_kind_have_a_schema(specs):
    shape = parameters_of(specs["move"])
    assert shape["required"] == ["move", "colour", "how"]
    properties = shape["properties"]
    assert properties["move"]["properties"] == {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}}
    assert properties["colour"]["enum"] == ["red", "blue"]
    assert {"type": "null"} in properties["when"]["anyOf"]
    assert properties["path"]["default"] == [0, 0]
    assert properties["count"] == {"type": "integer", "minimum": 1, "description": "How often.", "default": 1}
    assert "$defs" not in shape


def test_a_recursive_type_stays_a_reference():
    class Forest:
        def reset(self): ...

        def plant(self, tree: Tree):
            """Plant a tree."""

    (spec,) = tool_specs(Forest())
    shape = parameters_of(spec)
    assert shape["properties"]["tree"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}
    assert shape["$defs"]["Tree"]["properties"]["value"] == {"type": "integer"}


def test_missing_docstrings_and_hints_are_reported(specs):
    class Poor:
        def reset(self): ...

        def tool(self, a, b: complex, c: "Absent"):  # noqa: F821
            pass

    (spec,) = tool_specs(Poor())
    assert [problem.partition(":")[0] for problem in spec.problems] == [
        "it has no docstring",
        "parameter a",
        "parameter b",
        "parameter c",
    ]
    assert parameters_of(spec)["properties"] == {"a": {}, "b": {}, "c": {}}
    assert all(not specs[name].problems for name in ("move", "later"))


def test_a_docstring_of_another_style_is_kept_whole():
    class Env:
        def reset(self): ...

        def tool(self, a: int):
            """Do it.

            :param a: a number
            """

    (spec,) = tool_specs(Env())
    assert ":param a: a number" in spec.description


def test_a_parameter_for_any_number_of_positions_is_refused_with_its_form_as_a_list():
    class Env:
        def reset(self):
            pass

        def add(self, first: int, *numbers: int) -> int:
            """Add numbers."""

    with pytest.raises(ReferenceNotFoundError, match=r"Env\.add cannot be a tool.*'\*numbers'.*`numbers: list\[") as no:
        tool_specs(Env())
    assert "start the method's name with '_'" in str(no.value)


def test_a_decorated_tool_that_hides_its_parameters_has_a_problem():
    def log(function):
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    class Env:
        def reset(self):
            pass

        @log
        def add(self, a: int, b: int) -> int:
            """Add two numbers."""

    (spec,) = [spec for spec in tool_specs(Env()) if spec.name == "add"]
    assert any("functools.wraps" in problem for problem in spec.problems)


def test_a_positional_only_parameter_is_refused():
    class Env:
        def reset(self): ...

        def tool(self, a, /): ...

    with pytest.raises(ReferenceNotFoundError, match="positional-only"):
        tool_specs(Env())


def test_a_decorated_tool_keeps_its_signature():
    def logged(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    class Env:
        def reset(self): ...

        @logged
        def tool(self, a: int) -> int:
            """A tool."""
            return a

    env = Env()
    (spec,) = tool_specs(env)
    assert parameters_of(spec)["properties"] == {"a": {"type": "integer"}}
    assert env.tool(**bind_arguments(env.tool, {"a": 1})) == 1


def test_arguments_become_what_the_hints_say():
    bound = bind_arguments(
        Everything().move,
        {
            "move": {"x": 1},
            "colour": "red",
            "how": "slow",
            "when": "2026-08-21",
            "options": {"depth": 2},
            "path": [1, 2],
            "tags": ["a", "a"],
        },
    )
    assert bound == {
        "move": Move(1, 0),
        "colour": Colour.RED,
        "how": "slow",
        "when": dt.date(2026, 8, 21),
        "options": {"depth": 2},
        "path": (1, 2),
        "tags": {"a"},
    }


def test_an_integer_is_a_float_but_a_string_is_no_integer():
    assert bind_arguments(Everything().later, {"seconds": 3}) == {"seconds": 3.0}
    with pytest.raises(ToolArgumentError, match=r"replaced: b: expected `str`, got `int`"):
        bind_arguments(Everything().replaced, {"b": 3})


def test_keys_of_a_dict_may_be_integers():
    class Env:
        def tool(self, names: dict[int, str]): ...

    assert bind_arguments(Env().tool, {"names": {"1": "a"}}) == {"names": {1: "a"}}


def test_none_is_accepted_if_it_is_the_default():
    class Env:
        def tool(self, a: int = None): ...  # noqa: RUF013

    assert bind_arguments(Env().tool, {"a": None}) == {"a": None}
    assert bind_arguments(Env().tool, {}) == {}


def test_none_appears_once_in_the_schema():
    class Env:
        def reset(self): ...

        def say(self, word: Annotated[str | None, "What."] = None, often: int = None):  # noqa: RUF013
            """Say."""

    (spec,) = tool_specs(Env())
    nothing = {"type": "null"}
    assert parameters_of(spec)["properties"] == {
        "word": {"anyOf": [{"type": "string"}, nothing], "description": "What.", "default": None},
        "often": {"anyOf": [{"type": "integer"}, nothing], "default": None},
    }


def test_one_message_lists_all_errors():
    with pytest.raises(ToolArgumentError) as caught:
        bind_arguments(Everything().move, {"move": {"x": "1"}, "colour": "green", "color": "red"})
    message = str(caught.value)
    assert message.startswith("move: ")
    assert "how is missing" in message
    assert "move: expected `int`, got `str` - at `$.x`" in message
    assert 'colour: expected one of "red", "blue", got "green"' in message
    assert "color is not a parameter (there are: move, colour, how, when" in message


@pytest.mark.parametrize("arguments", [None, [1], "a"])
def test_arguments_that_are_no_object_are_refused(arguments):
    with pytest.raises(ToolArgumentError, match="must be an object"):
        bind_arguments(Everything().fixed, arguments)


def test_any_name_is_accepted_with_kwargs():
    class Env:
        def tool(self, a: int, **rest: str): ...

    assert bind_arguments(Env().tool, {"a": 1, "b": "2"}) == {"a": 1, "b": "2"}
    with pytest.raises(ToolArgumentError, match="b: expected `str`"):
        bind_arguments(Env().tool, {"a": 1, "b": 2})


def test_values_without_a_usable_hint_are_passed_unchanged():
    class Env:
        def tool(self, a, b: Any, c: complex): ...

    given = {"a": [1], "b": {"x": None}, "c": "1j"}
    assert bind_arguments(Env().tool, given) == given


def test_example_arguments_are_accepted_by_the_tool(specs):
    env = Everything()
    for spec in specs.values():
        bind_arguments(getattr(env, spec.name), example_arguments(parameters_of(spec)))


def test_example_arguments_of_a_type_that_must_hold_another_of_its_kind_end_with_none():
    node = {"$ref": "#/$defs/Node"}
    link = {"type": "object", "properties": {"next": {"anyOf": [node, {"type": "null"}]}}, "required": ["next"]}
    schema = {"properties": {"first": node}, "required": ["first"], "$defs": {"Node": link}}
    example = example_arguments(schema)["first"]
    while example is not None:
        example = example["next"]


def test_example_arguments_of_a_recursive_type_are_finite():
    class Env:
        def reset(self): ...

        def tool(self, trees: Annotated[list[Tree], msgspec.Meta(min_length=2)]): ...

    (spec,) = tool_specs(Env())
    assert len(bind_arguments(Env().tool, example_arguments(parameters_of(spec)))["trees"]) == 2

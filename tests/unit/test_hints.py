"""Type hints at every depth: the schema that the model receives, and the arguments that it may write."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, Optional, TypedDict, TypeVar, Union

import msgspec
import pydantic
import pytest

from envs.tools.argument_types import ArgumentValidationError, SchemaBuilder
from envs.tools.type_hints import UnsupportedTypeError, argument_type_of


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Sound(enum.Enum):
    LOW = (1, 2)
    HIGH = (3, 4)


@dataclasses.dataclass
class Item:
    """Something to buy.

    Attributes:
        name: What it
            is called.
        price: In cents.
    """

    name: str
    price: int
    colour: Colour = Colour.RED
    tags: list[str] = dataclasses.field(default_factory=list)
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        if self.price < 0:
            raise ValueError("a price below 0")


@dataclasses.dataclass
class Order:
    items: list[Item]
    """What is ordered."""
    note: Annotated[str, "For the courier."] = ""


class Range(TypedDict):
    """Numbers.

    Attributes:
        low: The lowest.
    """

    low: int
    high: NotRequired[Annotated[int, "The highest."]]


class Point(NamedTuple):
    x: int
    y: int = 0


@dataclasses.dataclass
class Tree:
    value: int
    children: "list[Tree]" = dataclasses.field(default_factory=list)


class Told(pydantic.BaseModel):
    """A pydantic model."""

    count: int = pydantic.Field(description="How many.", ge=1)
    word: str = "w"


Number = NewType("Number", int)
T = TypeVar("T")

ITEM = {
    "description": "Something to buy.",
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "What it is called."},
        "price": {"type": "integer", "description": "In cents."},
        "colour": {"enum": [1, "blue"], "default": 1},
        "tags": {"type": "array", "items": {"type": "string"}, "default": []},
    },
    "required": ["name", "price"],
}
ORDER = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "items": ITEM, "description": "What is ordered."},
        "note": {"type": "string", "description": "For the courier.", "default": ""},
    },
    "required": ["items"],
}
INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("hint", "schema", "written", "read"),
    [
        (Order, ORDER, {"items": [{"name": "n", "price": 1}]}, Order([Item("n", 1)])),
        (Optional[Item], {"anyOf": [ITEM, {"type": "null"}]}, None, None),  # noqa: UP045
        (Colour, {"enum": [1, "blue"]}, "blue", Colour.BLUE),
        (Sound, {"type": "string", "enum": ["LOW", "HIGH"]}, "HIGH", Sound.HIGH),
        (Literal["b", "a"], {"type": "string", "enum": ["b", "a"]}, "a", "a"),
        (Literal[1, "a", None], {"enum": [1, "a", None]}, None, None),  # noqa: PYI061
        (Union[int, list[int]], {"anyOf": [INTEGER, {"type": "array", "items": INTEGER}]}, [3], [3]),  # noqa: UP007
        (list[int] | set[str], None, ["a", "a"], {"a"}),
        (Item | Order, {"anyOf": [ITEM, ORDER]}, {"items": []}, Order([])),
        (float | int, None, 1, 1),
        (dict[str, list[Item]] | None, None, {"k": [{"name": "n", "price": 1}]}, {"k": [Item("n", 1)]}),
        (dict[int, str], {"type": "object", "additionalProperties": {"type": "string"}}, {"7": "x"}, {7: "x"}),
        (Mapping[str, Any], {"type": "object"}, {"a": [1]}, {"a": [1]}),
        (Sequence[int], {"type": "array", "items": INTEGER}, [1], [1]),
        (Iterable[str], {"type": "array", "items": {"type": "string"}}, ["a"], ["a"]),
        (tuple[int, ...], {"type": "array", "items": INTEGER}, [1, 2], (1, 2)),
        (list[Annotated[int, "Inner."]], {"type": "array", "items": {**INTEGER, "description": "Inner."}}, [1], [1]),
        (Annotated[int, msgspec.Meta(ge=0)], {**INTEGER, "minimum": 0}, 3, 3),
        (Annotated[list[Item], msgspec.Meta(max_length=1)], {"type": "array", "items": ITEM, "maxItems": 1}, [], []),
        (Number, INTEGER, 3, 3),
        (T, {}, {"any": "thing"}, {"any": "thing"}),
        (object, {}, 3, 3),
        (
            Range,
            {
                "description": "Numbers.",
                "type": "object",
                "properties": {
                    "low": {**INTEGER, "description": "The lowest."},
                    "high": {**INTEGER, "description": "The highest."},
                },
                "required": ["low"],
            },
            {"low": 1},
            {"low": 1},
        ),
        (
            Point,
            {"type": "object", "properties": {"x": INTEGER, "y": {**INTEGER, "default": 0}}, "required": ["x"]},
            {"x": 3},
            Point(3, 0),
        ),
        (
            Told,
            {
                "description": "A pydantic model.",
                "type": "object",
                "properties": {
                    "count": {"description": "How many.", "minimum": 1, "title": "Count", "type": "integer"},
                    "word": {"default": "w", "title": "Word", "type": "string"},
                },
                "required": ["count"],
            },
            {"count": 2},
            Told(count=2),
        ),
    ],
)
def test_a_hint_gives_a_schema_and_converts_values(hint, schema, written, read):
    shape, book = argument_type_of(hint), SchemaBuilder()
    if schema is not None:
        assert shape.schema(book) == schema
        assert book.definitions == {}
    result = shape.validate(written, "")
    assert (type(result), result) == (type(read), read)


@pytest.mark.parametrize(
    ("hint", "written", "wrong"),
    [
        (Order, {"items": [{"name": "n", "price": "x"}]}, "expected `int`, got `str` - at `$.items[0].price`"),
        (Order, {"items": [{"name": "n"}]}, "the field 'price' is missing - at `$.items[0]`"),
        (Order, {"items": [], "extra": 1}, "'extra' is not a field (there are: items, note)"),
        (Order, [], "expected `object`, got `array`"),
        (Item, {"name": "n", "price": -1}, "ValueError: a price below 0"),
        (Item, {"name": "n", "price": 1, "made": 1}, "'made' is not a field"),
        (Literal[1, 2], True, "expected one of 1, 2, got true"),
        (Colour, "RED", 'expected one of 1, "blue", got "RED"'),
        (int | None, "1", "expected `int`, got `str`"),
        (int | list[int], "1", "expected `int`, got `str` or expected `array`, got `str`"),
        (tuple[int, str], [1], "expected 2 items, got 1"),
        (tuple[int, str], [1, 2], "expected `str`, got `int` - at `$[1]`"),
        (dict[int, int], {"a": 1}, "the key 'a' is invalid"),
        (set[Any], [[1]], "its items are not hashable"),
        (Annotated[int, msgspec.Meta(ge=0)], -1, "expected `int` >= 0"),
        (list[Annotated[str, msgspec.Meta(max_length=2)]], ["abc"], "expected `str` of length <= 2 - at `$[0]`"),
        (Point, [1, 2], "expected `object`, got `array`"),
        (Range, {"high": 1}, "the field 'low' is missing"),
        (Told, {"count": "2"}, "input should be a valid integer - at `$.count`"),
        (Told, {"count": 0}, "input should be greater than or equal to 1 - at `$.count`"),
        (bool, 1, "expected `bool`, got `int`"),
        (int, 1.5, "expected `int`, got `float`"),
    ],
)
def test_an_invalid_value_is_reported_with_its_path(hint, written, wrong):
    with pytest.raises(ArgumentValidationError) as caught:
        argument_type_of(hint).validate(written, "")
    assert wrong in str(caught.value)


def test_a_recursive_class_is_a_reference_and_is_validated_at_any_depth():
    shape, book = argument_type_of(Tree | None), SchemaBuilder()
    schema = shape.schema(book)
    inner = {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "default": []}
    assert schema["anyOf"][0]["properties"]["children"] == inner
    assert book.definitions["Tree"]["properties"]["children"] == inner
    written = {"value": 1, "children": [{"value": 2, "children": [{"value": 3}]}]}
    assert shape.validate(written, "") == Tree(1, [Tree(2, [Tree(3)])])
    with pytest.raises(ArgumentValidationError, match=r"\$\.children\[0\]\.children\[0\]\.value"):
        shape.validate({"value": 1, "children": [{"value": 2, "children": [{"value": "x"}]}]}, "")


@pytest.mark.parametrize("hint", [complex, Callable[[int], int], type, dict[str, complex], list[Callable[..., int]]])
def test_a_type_that_json_cannot_express_is_refused(hint):
    with pytest.raises(UnsupportedTypeError, match="JSON cannot express"):
        argument_type_of(hint)

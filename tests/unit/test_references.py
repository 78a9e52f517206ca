"""References: three spellings, no fallback, and messages that name where to look."""

import sys
import textwrap

import anyio
import pytest

from envs.builtin.calculator import Calculator, exact_answer
from envs.factory import EnvironmentFactory
from envs.references import class_key, resolve
from envs.rewards import RewardBatch, RewardFunction
from stream.errors import ReferenceNotFoundError
from tests.cases.checks import tried


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Change to a temporary working directory; restore the path and the modules afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    yield write
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def refusal(ref, group="penstock.environments"):
    with pytest.raises(ReferenceNotFoundError) as caught:
        resolve(ref, group)
    return str(caught.value)


def test_an_entry_point_is_found_by_name():
    result = resolve("calculator", "penstock.environments")
    assert result.target is Calculator
    assert result.kind == "entry point"
    assert resolve("calculator_answer", "penstock.rewards").target is exact_answer


def test_a_module_is_found_with_a_dotted_attribute():
    result = resolve("envs.builtin.calculator:Calculator.add", None)
    assert result.target is Calculator.add
    assert result.kind == "module"
    assert result.module.__name__ == "envs.builtin.calculator"


def test_a_file_is_found_relative_to_the_working_directory(project):
    project("games/chess.py", "class Chess:\n    def reset(self): pass\n")
    result = resolve("games/chess.py:Chess", None)
    assert result.kind == "file"
    assert result.target.__name__ == "Chess"


def test_two_references_to_one_file_see_the_same_classes(project):
    path = project("both.py", "class Env:\n    def reset(self): pass\n\ndef reward(completions): return [0.0]\n")
    first = resolve("both.py:Env", None)
    second = resolve(f"{path}:reward", None)
    assert first.module is second.module


def test_a_file_may_import_its_neighbours(project):
    project("mine/rules.py", "LIMIT = 3\n")
    project("mine/game.py", "import rules\nclass Game:\n    limit = rules.LIMIT\n")
    assert resolve("mine/game.py:Game", None).target.limit == 3


def test_a_module_of_the_working_directory_is_found_behind_installed_ones(project):
    project("my_own_game.py", "class Game: pass\n")
    assert resolve("my_own_game:Game", None).target.__name__ == "Game"


def test_a_project_has_its_own_folder_called_envs(project):
    project("envs/house_rules.py", "PIECES = 32\n")
    project("envs/house_chess.py", "from envs.house_rules import PIECES\nclass Chess:\n    pieces = PIECES\n")
    assert resolve("envs.house_chess:Chess", None).target.pieces == 32
    assert resolve("envs/house_chess.py:Chess", None).target.pieces == 32


def test_dataclasses_work_in_a_file(project):
    project("data.py", "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int = 1\n")
    assert resolve("data.py:Point", None).target(2).x == 2


def test_the_key_of_a_files_class_does_not_depend_on_where_the_file_is(project):
    for folder in ("here", "there"):
        project(f"{folder}/snake_game.py", "class Env:\n    class Inner: pass\n")
    here, there = (resolve(f"{folder}/snake_game.py:Env.Inner", None).target for folder in ("here", "there"))
    assert here is not there
    assert class_key(here) == class_key(there) == "snake_game.py:Env.Inner"


def test_an_unknown_name_lists_the_known_ones():
    message = refusal("nonsense")
    assert "entry point" in message
    assert "calculator, guess" in message


def test_a_dotted_name_without_colon_suggests_the_right_form():
    assert "write envs.builtin.calculator:Calculator" in refusal("envs.builtin.calculator.Calculator")


def test_a_plain_name_without_a_group_is_refused():
    assert "write package.module:name" in refusal("calculator", None)


def test_there_is_no_fallback_from_a_file_to_a_module(project):
    project("game.py", "class Game: pass\n")
    assert "read as file" in refusal("other/game.py:Game")
    assert "does not end in .py" in refusal("./game:Game")
    assert "entry point" in refusal("game")


@pytest.mark.parametrize("ref", ["", ":", "game.py", "a/b", "game:", ":Game"])
def test_an_incomplete_reference_is_refused(ref):
    assert refusal(ref)


def test_a_misspelt_attribute_suggests_a_close_one():
    message = refusal("envs.builtin.calculator:Calculater")
    assert "did you mean Calculator?" in message
    assert "calculator.py" in message


def test_an_unknown_attribute_lists_what_the_module_defines():
    message = refusal("envs.builtin.guess:Zzz")
    assert "it defines: Guess" in message
    assert "Random" not in message


def test_a_missing_module_differs_from_a_module_with_a_missing_import(project):
    project("needs.py", "import a_library_nobody_has\nclass Env: pass\n")
    assert "there is no module 'absent_module'" in refusal("absent_module:Env")
    assert "there is no module 'envs.absent'" in refusal("envs.absent:Env")
    message = refusal("needs:Env")
    assert "ModuleNotFoundError: No module named 'a_library_nobody_has'" in message
    assert "needs.py, line 1" in message


def test_a_missing_file_lists_its_neighbours(project):
    project("games/chess.py", "")
    assert "beside it: chess.py" in refusal("games/ches.py:Chess")
    assert "folder does not exist" in refusal("nowhere/ches.py:Chess")


def test_an_error_while_importing_names_the_line(project):
    project("broken.py", "x = 1\n\ndef f():\n    return 1 / 0\n\nf()\n")
    message = refusal("broken.py:Env")
    assert "ZeroDivisionError" in message
    assert "broken.py, line 4" in message


def test_a_file_that_exits_while_imported_is_an_error(project):
    project("script.py", "import sys\nsys.exit(3)\n")
    assert "SystemExit: 3" in refusal("script.py:Env")


def test_a_file_that_failed_can_be_repaired(project):
    path = project("retry.py", "raise ValueError('not yet')\n")
    assert "not yet" in refusal("retry.py:Env")
    path.write_text("class Env: pass  # at last\n", encoding="utf-8")
    assert resolve("retry.py:Env", None).target.__name__ == "Env"


# Factories


def test_a_factory_knows_its_environment():
    factory = EnvironmentFactory.load("guess")
    assert factory.environment_class.__name__ == "Guess"
    assert [tool.name for tool in factory.tools] == ["guess"]
    assert factory.has_reward
    assert not EnvironmentFactory.load("calculator").has_reward
    assert factory.make() is not factory.make()


def test_a_function_is_a_factory_too_and_its_sample_is_closed(project):
    project(
        "made.py",
        """
        CLOSED = []
        class _Env:
            def __init__(self, size): self.size = size
            def reset(self): pass
            async def close(self): CLOSED.append(self.size)
        def small():
            return _Env(3)
        """,
    )
    factory = EnvironmentFactory.load("made.py:small")
    assert factory.make().size == 3
    assert factory.reference.module.CLOSED == [3, 3]  # a function makes two, to see that they differ


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("Env = [1]", "of type list"),
        ("class Env:\n    pass", "without a reset method"),
        ("class Env:\n    reset = 3", "without a reset method"),
        ("class Env:\n    def __init__(self): raise OSError('no display')", "OSError: no display"),
        ("class Env:\n    def __init__(self, size): pass", "missing 1 required positional argument"),
        ("class Env:\n    def reset(self): pass\n    def go(self, x, /): pass", "positional-only"),
        ("async def Env(): pass", "is async"),
        ("import sys\ndef Env(): sys.exit('gone')", "SystemExit: gone"),
    ],
)
def test_a_factory_without_an_environment_is_refused_at_the_start(project, code, message):
    project("bad.py", code + "\n")
    with pytest.raises(ReferenceNotFoundError, match=message):
        EnvironmentFactory.load("bad.py:Env")


ONE = """
import functools
class _Env:
    def reset(self, word): self.word = word
    def get_reward(self): return float(self.word == "yes")
"""


SINGLETONS = {
    "global": "THE_ONE = _Env()\ndef Env(): return THE_ONE",
    "cached": "@functools.cache\ndef Env(): return _Env()",
    "__new__": """
class Env(_Env):
    one = None
    def __new__(cls):
        cls.one = cls.one or super().__new__(cls)
        return cls.one
""",
    "metaclass": """
class One(type):
    one = None
    def __call__(cls):
        cls.one = cls.one or super().__call__()
        return cls.one
class Env(_Env, metaclass=One): ...
""",
}


@pytest.mark.parametrize("code", SINGLETONS.values(), ids=SINGLETONS)
def test_a_factory_that_returns_one_object_twice_is_refused_at_the_start(project, code):
    """Two episodes in one object would measure each other: the second `reset` replaces the word of the first."""
    project("one.py", ONE + code + "\n")
    with pytest.raises(ReferenceNotFoundError, match=r"'one.py:Env'.* returned the same object twice"):
        EnvironmentFactory.load("one.py:Env")
    (error,) = tried("one.py:Env", {"word": "yes"}).errors
    assert "the same object twice" in error


def test_a_class_whose_calls_cannot_return_one_object_twice_is_made_only_once_at_the_start(project):
    project(
        "costly.py",
        """
        MADE = []
        class Env:
            def __init__(self): MADE.append(self)
            def reset(self): pass
        def make():
            return Env()
        """,
    )
    module = EnvironmentFactory.load("costly.py:Env").reference.module
    assert len(module.MADE) == 1
    EnvironmentFactory.load("costly.py:make", with_tools=False)  # what a scorer needs, which plays no episode
    assert len(module.MADE) == 2
    EnvironmentFactory.load("costly.py:make")
    assert len(module.MADE) == 4


def test_a_close_that_raises_does_not_keep_an_environment_from_being_used(project):
    project("env.py", "class Env:\n    def reset(self): pass\n    def close(self): raise OSError('already gone')\n")
    assert EnvironmentFactory.load("env.py:Env").make() is not None


class All:
    def reset(self, **row): ...


class Some:
    def reset(self, answer, seed=None): ...


class Nothing:
    def reset(self): ...


def test_reset_gets_only_the_arguments_it_names():
    factory = EnvironmentFactory.load("guess")
    fields = {"answer": 4, "problem": "2 + 2"}
    reset = factory.reset_arguments
    assert reset(All(), fields, 7, 2) == fields | {"seed": 7, "completion_seed": 9, "completion_index": 2}
    assert reset(Some(), fields, 7, 2) == {"answer": 4, "seed": 7}
    assert reset(Nothing(), fields, 7, 2) == {}


def test_a_field_of_the_row_overrides_the_seed():
    assert EnvironmentFactory.load("guess").reset_arguments(All(), {"seed": "of the row"}, 7, 2)["seed"] == "of the row"


def test_known_classes_are_those_of_the_factorys_modules_and_imported_records(project):
    project("shapes.py", "import dataclasses\n@dataclasses.dataclass\nclass Box: pass\nclass Handle: pass\n")
    project(
        "table.py",
        """
        import enum, subprocess
        from shapes import Box, Handle
        from subprocess import Popen
        class Base:
            def reset(self): pass
        class Env(Base):
            class Mood(enum.Enum):
                GOOD = 1
        """,
    )
    known = EnvironmentFactory.load("table.py:Env").known_classes
    assert set(known) == {"table.py:Base", "table.py:Env", "table.py:Env.Mood", "shapes:Box"}


# Reward functions


@pytest.mark.parametrize(("code", "message"), [("reward = 3", "of type int"), ("class reward: pass", "of type reward")])
def test_other_objects_than_reward_functions_are_refused_at_the_start(project, code, message):
    project("bad_reward.py", code + "\n")
    with pytest.raises(ReferenceNotFoundError, match=message):
        RewardFunction.load("bad_reward.py:reward")


def test_a_reward_function_may_be_given_arguments_or_be_made_with_them(project):
    project(
        "made.py",
        """
class Longer:
    def __init__(self, than): self.than = than
    async def __call__(self, completions): return [len(c) > self.than for c in completions]

def shorter(completions, than): return [len(c) < than for c in completions]
""",
    )
    batch = RewardBatch(prompts=["", ""], completions=["a", "abc"], completion_ids=[[], []])
    for name, expected in [("Longer", [0.0, 1.0]), ("shorter", [1.0, 0.0])]:
        function = RewardFunction.load(f"made.py:{name}", args={"than": 2})
        assert [reward.value for reward in anyio.run(function, batch, 5.0)] == expected


def test_unknown_arguments_are_refused_at_the_start(project):
    project(
        "takes.py",
        "class Env:\n    def __init__(self, size=1): pass\n    def reset(self): pass\n"
        "def reward(completions): return []\n",
    )
    with pytest.raises(ReferenceNotFoundError, match="takes no argument 'seize'; args may give: size"):
        EnvironmentFactory.load("takes.py:Env", {"seize": 3})
    with pytest.raises(ReferenceNotFoundError, match="takes no argument 'than'"):
        RewardFunction.load("takes.py:reward", args={"than": 3})


def test_a_factory_is_called_with_the_arguments_of_the_settings(project):
    project("sized.py", "class Env:\n    def __init__(self, sizes): self.sizes = sizes\n    def reset(self): pass\n")
    factory = EnvironmentFactory.load("sized.py:Env", {"sizes": [3]})
    factory.make().sizes.append(4)
    assert EnvironmentFactory.load("sized.py:Env", {"sizes": [3]}).make().sizes == [3]


def test_a_reward_function_is_named_after_its_reference(project):
    project("scores.py", "def tidy(completions): return []\n")
    assert RewardFunction.load("calculator_answer", 0.5, "rollout").name == "calculator_answer"
    assert RewardFunction.load("scores.py:tidy").name == "tidy"

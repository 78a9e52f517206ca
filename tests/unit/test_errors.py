"""The tree in the docstring of `stream.errors` is the class hierarchy."""

import re

from stream import errors


def test_the_documented_tree_is_the_class_hierarchy():
    documented, path = {}, []
    for prefix, name in re.findall(r"^    ([│├└─ ]*)([A-Z]\w+)$", errors.__doc__, re.MULTILINE):
        depth = len(prefix) // 4
        path[depth:] = [name]
        documented[name] = path[depth - 1] if depth else "Exception"
    defined = {
        name: result.__base__.__name__
        for name, result in vars(errors).items()
        if isinstance(result, type) and issubclass(result, BaseException)
    }
    assert documented == defined

"""Snapshots: what is left of an environment when its episode is over.

Taken when a completion ends, before its environment is reset for the next one: `copy.copy` first, which is where a
class's own `__copy__` drops its handles; then bytes at once, since a shallow copy shares every list with the live
object. Reward functions are handed what `thaw` makes of them, an object of the factory's own class with the same
attributes, so that its properties and methods work. It was never initialised and holds no handles.

::

    [1, {attribute: value, ...}, {attribute: why it was left out, ...}, contents]

Attributes are those of `__dict__` and of all `__slots__`, private ones too; contents those of a class derived from a
dict, list or the like. Values are in the form of `values.py`, objects within them in this same form with their class's
name in front, which is only ever looked up in the factory's closed table of classes.

===============  ============================================================================
`freezing.py`    an environment as bytes
`thawing.py`     and back
`frozen.py`      an object in parts
`values.py`      Python values as msgpack, and back; a type that should survive is added here
===============  ============================================================================
"""

from envs.snapshot.freezing import freeze
from envs.snapshot.thawing import Namespace, omitted_attributes, thaw

__all__ = ("Namespace", "freeze", "omitted_attributes", "thaw")

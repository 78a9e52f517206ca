"""Snapshots: an environment's state at the end of an episode, as bytes.

A snapshot is taken before the environment is reset for the next episode: `copy.copy` first, where a class's own
`__copy__` drops its handles, then bytes at once, because a shallow copy shares its lists with the live object. Reward
functions receive the thawed snapshot: an instance of the environment's class, made without `__init__`, with the same
attributes, so its properties and methods work. It holds no handles.

::

    [1, {attribute: value, ...}, {attribute: why it was omitted, ...}, contents]

Attributes are those in `__dict__` and in all `__slots__`, private ones included; contents are those of a class derived
from dict, list or the like. Values are encoded as in `value_codec.py`. Nested objects have the same form with their
class name instead of the version; the name is only looked up among the environment's known classes, never imported.
"""

from envs.snapshot.freezing import Namespace, TooLarge, freeze, omitted_attributes, thaw, thaw_and_watch

__all__ = ("Namespace", "TooLarge", "freeze", "omitted_attributes", "thaw", "thaw_and_watch")

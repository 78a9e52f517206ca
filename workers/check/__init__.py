"""Everything that is tried before anything is started: a settings file, an environment, or a reward function.

`check` tries what it is given and returns a report; `penstock check` prints it, and `penstock run` asks for it in a
process of its own. An error means that the run cannot work; a warning, that it probably does not do what was meant.
"""

"""Tasks in Harbor's format: an image, an instruction, tests that are the verifier, and a solution that proves them.

::

    task folder --task--> steps --environment--> policy's sandbox --verification--> fresh sandbox, tests --> reward
"""

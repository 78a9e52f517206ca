"""Base models that Penstock ships: small files, made by scripts in this repository, that a run can start from.

::

    calculator     the demo's model: uses a calculator, badly        made by workers/demo/make_base_model.py
    tool-caller    calls any tools by their schemas, at random        made by make_tool_caller.py

`make_tool_caller.py` renders random conversations (`tool_transcripts.py`, of `words.py`) in the form of
`tool_markup.py`, and trains (`imitation.py`) a Qwen3 (`small_model.py`) that can copy from the start (`induction.py`).


A package folder holds the weights as float16, the tokenizer, and `made_from.json`: hashes of what the script made it
from. A test makes the hashes again, so a change of a template or of the transcripts cannot leave an old model behind.
"""

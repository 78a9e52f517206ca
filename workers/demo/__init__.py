"""The demo: a tiny model learns to use a calculator on a laptop's CPU within minutes.

::

    task ──► transcripts ──► model (tokenizer, template, random weights) ──► warm_start ──► shipped base model
      └────► prompts for the run, and held-out problems for its score

`tests/base_models/make_demo_model.py` runs the upper row, once; a demo copies its result (`models/`).

The base model's habit is to answer after the first of two tool calls; about one episode in four is correct.
Reinforcement learning has to reinforce the correct behavior and to unlearn the habit.
"""

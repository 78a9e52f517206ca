"""The demo: a tiny model learns to use a calculator, on a laptop's processor, in a few minutes.

::

    task ──► transcripts ──► model (tokenizer, template, random weights) ──► warmstart ──► a policy with a bad habit
      └────► prompts for the run, and held-out ones to measure it by

The habit is to answer after the first of two tool calls; about one episode in four is right. Reinforcement learning
has something to find there, and something to unlearn.
"""

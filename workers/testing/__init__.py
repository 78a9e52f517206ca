"""Test doubles for tests of environments and of the pipeline. Does not import torch.

===================  ==============================================================
`play`, `call`       run one episode of an environment without a model
`ScriptedEngine`     is an engine without a model (`workers.testing.scripted_engine`)
===================  ==============================================================
"""

from workers.testing.play import Call, EpisodeResult, call, play

__all__ = ("Call", "EpisodeResult", "call", "play")

"""Stand-ins for those who test environments, or the pipeline itself. No torch.

===================  ==============================================================
`play`, `call`       an author's unit test of an environment, without a model
`ScriptedEngine`     an engine without a model (`workers.testing.scripted_engine`)
===================  ==============================================================
"""

from workers.testing.play import Call, EpisodeResult, call, play

__all__ = ("Call", "EpisodeResult", "call", "play")

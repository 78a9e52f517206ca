"""Rewards that a server measures, asked over HTTP.

===================  ======================================================================
`service.py`         servers that are alike: deadlines, retries by class of failure
`reward_model.py`    `reward_model`: a served reward model; gathers what many groups ask
`probe.py`           whether it is one, and whether its scores are raw
`tally.py`           what it did, for the log
`classify.py`        what goes over HTTP to and from it
`judge.py`           `judge`: the verdict of a language model
===================  ======================================================================
"""

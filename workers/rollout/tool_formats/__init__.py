"""Parsers of tool calls, one file per format.

===================  ====================================================================
`registry.py`        the formats by name
`parsed_turn.py`     the types: a call, a parsed turn, a format
`parsing.py`         parsing that the formats share
`reasoning.py`       where a turn's reasoning ends
===================  ====================================================================
"""

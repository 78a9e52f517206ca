"""The engines of a run, as those see them that sample from them or give them weights. No torch.

===================  ================================================================
`roster.py`          which there are
`addresses.py`       their URLs, and names that stand for several
===================  ================================================================
"""

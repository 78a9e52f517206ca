"""Ranks and sharded tensors: what models and steps of several processes are built on."""

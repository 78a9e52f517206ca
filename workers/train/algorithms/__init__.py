"""The mathematics: tensors in, tensors out, by name; nothing known of streams, settings or models.

A batch goes through it in this order (the rooms that it passes are files)::

    facts ─► rejection ─► masks B, L ─► filters ─► shaping ─► advantages ────────► losses ─► loss, gradient
             too old,     one place,    groups     rewards    by group, by token   every token's share
             off-policy   once          that       made ready whitening            is set by aggregation,
             (selection)                teach                                      of the whole batch
                             └─► importance weights, over survivors ──────────────┘

Everything is found by id, never by position: groups may be interleaved, completions may have several rows, rows any
length. What stands outside of a mask is replaced before any arithmetic, so it may be anything.

Each kind of function has a `registry.Registry`: a function declares its formula, its source and what is true of it, and
the property tests hold it to that; what it needs is said by its positional parameters, its options by the keyword-only
ones. So a new one is one function with one decorator (and its options in `workers.settings`).

Axes in names: C completions, R rows, T tokens of a row or of a completion, G groups, P parts of a reward.
"""

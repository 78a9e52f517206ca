"""The mathematics of training: pure functions from tensors to tensors, without streams, settings or models.

A batch passes through these modules in order::

    facts ─► masks B, L ─► rejection ─► filters ─► shaping ─► advantages ───────► losses ─► loss, gradient
             once per      too far       groups     rewards    per completion,     factors of all tokens
             batch         off-policy    to drop               per token           come from aggregation
                               └─► importance weights of the surviving tokens ───────┘

Completions and groups are found by id, never by position: groups may be interleaved, completions may have several rows,
rows may have any length. Values outside a mask are replaced before any arithmetic, so they may be anything.

Each kind of function has a `registry.Registry`. A function declares its formula, its source and its properties, which
the property tests check; its positional parameters name its inputs, its keyword-only parameters its options. To
add one, write a function with the registry's decorator, and put its options into `workers.settings`.

Axes in names: C completions, R rows, T tokens of a row or completion, G groups, P parts of a reward, S completions with
a row, N selected tokens.
"""

"""Records, queues and files that a run's processes share, and how no prompt is lost or counted twice.

::

    feed ─► [prompts] ─► rollout xN ─► [groups] ─► score xM ─► [scored] ─► train
                                                                             │ commits at a step,
          any stage, failure limit reached or record unreadable ─► [dead] ◄──┘ acknowledges at a checkpoint

Each `[ ]` is a Redis stream with a consumer group. A claim is a lease, renewed while its worker lives. To complete an
entry is one atomic step: if the lease is still held, the output is added and the input deleted. To release an entry
gives it back, up to a failure limit; an entry that is unreadable or has reached its limit becomes a dead letter. The
Lua scripts in `stream/lua/` are the whole protocol.

To feed prompts: `Feed`. To work on a stage: `Stage`. To train: `consume`; it is built on `TrainerLease`, `Ledger` and
`Archive`. To inspect a run: `read_status`, `list_dead_letters`, `ArchivedGroups`.
"""

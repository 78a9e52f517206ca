"""Who does what. One process to a role; the roles are blind to one another and meet in the streams.

::

             feed ─► [prompts] ─► rollout xN ─► [groups] ─► score xM ─► [scored] ─► train ─► policy v+1
                                    │   ▲                                             │
                        environments   tokens                                    weights
                                    ▼   │                                             │
                                   engine (vLLM, or `engine/`, the local one) ◄───────┘

============  =========================  ========================  ==================================
role          waits for                  is freed by               gives
============  =========================  ========================  ==================================
``feed``      room in the backlog        a claim of prompts        prompts
``rollout``   a prompt and a free place  feed; a place given back  groups of completions
``score``     a group                    rollout                   the same groups with rewards
``train``     a full batch               score                     policy versions, places given back
============  =========================  ========================  ==================================

Shared by roles: `role`, `pump` (claim, work, end each lease), `parts` (reward functions
on a group), `room`, `settings`, `logs`. Around them: `cli/` (with `failures`, `installation`), `run/` (the supervisor),
`queues`, `dead`, `check`, `demo/`, and `testing/` for those who write tests.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

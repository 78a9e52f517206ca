"""The roles of a run, engines, supervisor and command line. One process per role; roles meet in the streams.

::

             feed ─► [prompts] ─► rollout xN ─► [groups] ─► score xM ─► [scored] ─► train ─► policy v+1
                                    │   ▲                                             │
                        environments   tokens                                    weights
                                    ▼   │                                             │
                                   engine (vLLM, or `local_engine/`) ◄────────────────┘

============  ===========================  ============================  ==================================
role          waits for                    is woken by                   produces
============  ===========================  ============================  ==================================
``feed``      space in the prompt queue    a claim of prompts            prompts
``rollout``   a prompt and free capacity   feed; capacity that is freed  groups of completions
``score``     a group                      rollout                       the same groups with rewards
``train``     a full batch                 score                         policy versions, free capacity
============  ===========================  ============================  ==================================

From upper to lower: `cli/`, `demo/`, `commands/`, `run/` and `testing/`, the four roles, `local_engine/`, `vllm/`,
`runtime/` (shared by roles), `engine_api/` (shared by engines and their clients), `settings/`.
"""

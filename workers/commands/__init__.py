"""The operator commands of `penstock`, one module or package each.

::

    acl           Redis users for a run            check/        try an environment or a reward function
    algorithms    list estimators and losses       evaluate/     measure a policy without a run
    audit         account for every prompt         rescore/      score archived groups again
    control       pause, resume, stop              rewardbench/  measure a reward model
    dead_letters  list, show, retry, drop          output        printing, shared by all
    engines       list, add, remove                run_files     files of a run, shared by some
    queues        where a run's prompts are        prompt_index  ids of prompts, for the audit
    replay        train a run's groups again
"""

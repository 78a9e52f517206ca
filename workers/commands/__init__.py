"""The operator commands of `penstock`, one module or package each.

::

    algorithms    list estimators and losses       replay        train a run's groups again
    audit         account for every prompt         check/        try an environment or a reward function
    control       pause, resume, stop              evaluate/     measure a policy without a run
    dead_letters  list, show, retry, drop          rescore/      score archived groups again
    engines       list, with their health          rewardbench/  measure a reward model
    queues        where a run's prompts are        output        printing, shared by all
                                                   run_files     files of a run, shared by some
                                                   prompt_index  ids of prompts, for the audit
"""

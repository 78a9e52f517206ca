"""The operator commands of `penstock` that are more than a look at a run, one module or package each.

::

    acl           Redis users for a run            evaluate/     measure a policy without a run
    algorithms    list estimators and losses       play/         play an environment against a model
    check/        try an environment or a reward   replay        train a run's groups again
    control       pause, resume, stop              rescore/      score archived groups again
    engines       add, remove                      rewardbench/  measure a reward model
"""

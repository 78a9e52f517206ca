"""The operator commands of `penstock` that are more than a look at a run, one module or package each.

::

    algorithms    list estimators and losses       replay        train a run's groups again
    control       pause, resume, stop              rescore/      score archived groups again
    evaluate/     measure a policy without a run   rewardbench/  measure a reward model
    play/         play an environment against a model
"""

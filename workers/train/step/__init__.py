"""One optimizer step: from groups to updated weights. Nothing here knows of streams, or waits.

::

    groups ─► batch ─► group_checks ─► prepared_batch ─────────────────────► learner: updates by micro-batch ─► metrics
              tensors  masks, filters  statistics, rejection, advantages, ─►   model_runner: forward, backward
                                       policy comparison, loss weights         loss: read from the prepared batch

=======================  ================================================================
`batch.py`               groups as tensors, merged into batches, split into micro-batches
`reward_parts.py`        reward parts and turn rewards, read from records
`group_checks.py`        masks under a run's settings; whether a group is worth training on
`estimation.py`          rewards shaped and normalized, the estimator called: advantages
`policy_comparison.py`   old and proximal log-probs, importance weights
`prepared_batch.py`      everything that is decided before the first gradient, in stages
`loss.py`                the loss of one micro-batch: policy, entropy, KL, value
`model_runner.py`        passes of policy, reference and critic over rows
`optimizer.py`           AdamW, its learning rates, its state by name
`learner.py`             trains on one batch at a time
`metrics.py`             the metrics of a step, and its report
`trained_rows.py`        what the step did with every sampled token, for the annotations
=======================  ================================================================

`group_checks`, `estimation`, `policy_comparison`, `prepared_batch` and `loss` connect `algorithms` with the settings;
`model_runner` connects it with the model.
"""

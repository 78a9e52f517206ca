"""One optimizer step: from groups to updated weights. Nothing here knows of streams, or waits.

::

    groups ─► batch ─► group_checks ─► prepared_batch ─────────────────────► learner: updates by micro-batch ─► metrics
              tensors  masks, filters  statistics, rejection, advantages, ─►   model_runner: forward, backward
                                       policy comparison, loss weights         loss: read from the prepared batch

`group_checks`, `estimation`, `prepared_batch` and `loss` connect `algorithms` with the settings; `model_runner`
connects it with the model.
"""

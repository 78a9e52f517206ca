"""A weight-transfer backend for vLLM: checkpoints from a path or over HTTP, into a server that runs.

==================  =================================================================
`engine.py`         the backend: stages an update, checks it, brings it into the model
`source.py`         where the files come from: a folder, or downloads that are checked
`checkpoint.py`     names, shapes and tensors, and how an update may differ
`asking.py`         which tensors a live model takes
`verdict.py`        what is said of an update that is not taken
`pieces.py`         the parts of vLLM that this rests on, and whether they are there
==================  =================================================================

Imports nothing of Penstock, and of vLLM only once it is asked for.
"""

import logging

BACKEND = "penstock"
"""In `--weight-transfer-config '{"backend": "penstock"}'`."""
TESTED_VLLM_VERSION = "0.32.0"
"""The version of vLLM that the tests run on."""


def register() -> None:
    """Tell vLLM of the backend; vLLM calls this in each of its processes, also where nobody uses the backend."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(BACKEND, "penstock_vllm.engine", "CheckpointTransfer")
    except ImportError:
        logging.getLogger(__name__).warning(
            "this vLLM has no weight transfer, so its server cannot take new weights from Penstock; known to work: %s",
            TESTED_VLLM_VERSION,
        )
    except ValueError:
        pass  # registered by an earlier call in this process

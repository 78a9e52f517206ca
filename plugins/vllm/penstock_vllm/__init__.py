"""A weight-transfer backend for vLLM that loads checkpoints from a path or over HTTP into a running server.

====================  ================================================================
`engine.py`           the backend: stages an update, checks it, loads it into the model
`weight_download.py`  downloads files over HTTP and checks them
`checkpoint.py`       reads names, shapes and tensors; checks whether an update fits
`tensor_probe.py`     finds out which tensors a live model loads
`errors.py`           errors of updates that fail
`vllm_internals.py`   finds the internal functions of vLLM that the backend needs
====================  ================================================================

Does not import Penstock, and imports vLLM only when vLLM calls it.
"""

import logging

BACKEND = "penstock"
"""Name of the backend, as in `--weight-transfer-config '{"backend": "penstock"}'`."""
TESTED_VLLM_VERSION = "0.32.0"
"""Version of vLLM that the tests run on."""


def register() -> None:
    """Register the backend; vLLM calls this in each of its processes, even if another backend is configured."""
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

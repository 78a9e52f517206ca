"""A weight-transfer backend for vLLM that loads checkpoints from a path or over HTTP into a running server.

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

        WeightTransferEngineFactory.register_engine(BACKEND, "penstock_vllm.weight_updates", "CheckpointTransfer")
    except ImportError:
        logging.getLogger(__name__).warning(
            "this vLLM has no weight transfer, so its server cannot take new weights from Penstock; known to work: %s",
            TESTED_VLLM_VERSION,
        )
    except ValueError:
        pass  # registered by an earlier call in this process

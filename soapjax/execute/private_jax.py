"""What soapjax takes from `jax._src`: all of it is here, each with its reason.

* `distributed`: the key-value store and the barriers of the coordination service. Its client is not public, and nothing public
  does the same: `multihost_utils` needs device collectives, which must not run before all processes agree.
* `clusters`: which processes a Slurm, Open MPI or Kubernetes job has, before they are connected.
* `batched_copy` and `REUSE_INPUT`: the copy that `jax.device_put` ends in, called directly by pipelines, which move
  hundreds of small tensors per step.

tests/execute/test_agreement.py and tests/execute/test_transfer.py fail, and say what is missing, where a new version moves one.
"""

from __future__ import annotations

from jax._src import clusters, distributed
from jax._src.lib import xla_client

batched_copy = xla_client.batched_copy_array_to_devices_with_sharding
REUSE_INPUT = xla_client.ArrayCopySemantics.REUSE_INPUT

__all__ = ["REUSE_INPUT", "batched_copy", "clusters", "distributed"]

"""A pipeline over two processes gives the single-device step's numbers; each process has one stage."""

import os
import socket
import subprocess
import sys
from pathlib import Path

WORKER = r"""
import sys
import jax
rank, coordinator, transfer = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_cross_host_transfer_socket_address", transfer)
jax.config.update("jax_cross_host_transport_addresses", "127.0.0.1:0")
jax.distributed.initialize(coordinator, 2, rank)
import numpy as np
from models import mlp
from soapjax import soap_shard
step, state, batch = mlp.make(batch=8, width=16, layers=3, features=8)
state, batch = jax.tree.map(np.asarray, (state, batch))
sharded = soap_shard(step, topology="cpu8", devices=jax.devices(), pipeline=sys.argv[4], stages=2, microbatches=4)
plain = jax.jit(step)
single = state
for _ in range(3):
    state, metrics = sharded(state, batch)
    single, wanted = plain(single, batch)
worst = 0.0
for mine, theirs in zip(jax.tree.leaves(state["opt_state"][0].mu), jax.tree.leaves(single["opt_state"][0].mu)):
    for shard in mine.addressable_shards:
        found, value = np.asarray(shard.data), np.asarray(theirs)[shard.index]
        worst = max(worst, float(np.linalg.norm(found - value) / max(np.linalg.norm(theirs), 1e-12)))
loss = [float(s.data) for s in metrics["loss"].addressable_shards]
own = sum(bool(x.addressable_shards) for x in jax.tree.leaves(state["params"]))
print("RESULT", rank, worst, abs(loss[0] - float(wanted["loss"])) if loss else 0.0, own, flush=True)
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes():
    root = Path(__file__).resolve().parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    coordinator = f"127.0.0.1:{free_port()}"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), coordinator, f"127.0.0.1:{free_port()}", "1f1b"],
            env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        ended = [w.communicate(timeout=120) for w in workers]
    finally:
        for w in workers:
            w.kill()
    results = [line.split() for out, _ in ended for line in out.splitlines() if line.startswith("RESULT")]
    assert len(results) == 2, "\n".join(err[-2000:] for _, err in ended)
    for _, _, worst, loss, own in results:
        assert float(worst) <= 1e-5 and float(loss) <= 1e-5
        assert 0 < int(own) < 8  # each holds its stage's parameters alone
    assert sum(int(r[4]) for r in results) == 8

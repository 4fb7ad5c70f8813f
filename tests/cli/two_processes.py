"""Run as a program by test_profile_commands.py: one of two processes with a CPU device each. python two_processes.py RANK PORT"""

import os
import sys

rank, port = int(sys.argv[1]), sys.argv[2]

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)

from models import mlp  # noqa: E402
from soapjax import soap_shard  # noqa: E402

step, state, batch = mlp.make(batch=64, width=512, layers=2, features=256, classes=64)
train_step = soap_shard(step, topology="local", planner="fsdp", verify_top=2)
state, metrics = train_step(state, batch)
plan = train_step.plan
assert os.environ["JAX_PLATFORMS"] == "cpu"
table = [(t.strategy, t.predicted_s, t.measured_s) for t in plan.provenance.verified]
print(f"plan {plan.plan_sha256} {plan.prediction.step_time_s} {table}", flush=True)

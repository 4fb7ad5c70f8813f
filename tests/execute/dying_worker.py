"""One process of a pipeline over several; the rank that is told to kills or stops itself in the middle of its third step."""

import os
import signal
import sys
import threading

import jax

import soapjax
import soapjax.distributed
from models import mlp

victim, way, silence_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
soapjax.distributed.initialize(timeout_s=60, silence_s=silence_s)
step, state, batch = mlp.make(batch=16, width=16, layers=3, features=8)
sharded = soapjax.soap_shard(step, devices=jax.devices(), pipeline="1f1b", stages=jax.process_count(), microbatches=4)
for i in range(3):
    if i == 2 and jax.process_index() == victim:
        if way == "raises":
            raise ValueError("the data ended")
        print("dying", flush=True)
        threading.Thread(target=os.kill, args=(os.getpid(), getattr(signal, way))).start()
    state, metrics = sharded(state, batch)
    loss = float(metrics["loss"])
print("finished", flush=True)

"""What a pipeline is compared with beside other pipelines: strategies of one program, priced by the rules of stages."""

from __future__ import annotations

import numpy as np

from soapjax.costs.split_share import share_of
from soapjax.search.stage_loads import StageLoads
from soapjax.strategy.plan import StrategyFigures


def whole_baselines(loads: StageLoads) -> dict[str, StrategyFigures]:
    """Strategies without a pipeline, by the same rules: one stage of all operators on all devices."""
    usable, count = loads.topology.device.usable_memory_bytes, loads.topology.num_devices
    best: dict[str, StrategyFigures] = {}
    everything = (0, len(loads.forward))
    for k, inside in enumerate(loads.choices(0, count, 1)):
        load = loads.load(everything, 0, count, 1, k)
        name = "tensor_parallel" if inside.name.startswith("tensor") else "fsdp" if "sharded" in inside.name else "data_parallel"
        step_s = load.forward_s + load.backward_s + load.update_s
        memory = load.state_bytes + load.gradient_bytes + load.working_bytes
        if (name == "data_parallel" or memory <= usable) and (name not in best or step_s < best[name].step_time_s):
            serial = loads.load_of(everything, 0, count, 1, inside.figures, overlap=False)
            sends = loads.sends(everything, 0, count, 1, inside.strategy, inside.figures)
            split = np.array([loads.split_flops(everything, 0, count, 1, inside.strategy, inside.figures)])
            best[name] = StrategyFigures(
                step_time_s=step_s, without_overlap_s=serial.forward_s + serial.backward_s + serial.update_s,
                split_flops_share=share_of(*split.T), memory_bytes_per_device=int(memory),
                sent_bytes=sum(sum(s.bytes.values()) for s in sends), feasible=memory <= usable,
                peak_sent_bytes=sum(sum(s.bytes.values()) for s in sends),
            )  # fmt: skip
    return best

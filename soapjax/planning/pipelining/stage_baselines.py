"""What a pipeline is compared with beside other pipelines: strategies of one program, priced by the rules of stages."""

from __future__ import annotations

from soapjax.costs.split_share import share_of
from soapjax.search.stages.condensed_loads import CondensedLoads
from soapjax.search.stages.stage_figures import expert_of
from soapjax.strategy.plan import StrategyFigures


def whole_baselines(loads: CondensedLoads) -> dict[str, StrategyFigures]:
    """Strategies without a pipeline, by the same rules: one stage of all operators on all devices."""
    usable, count = loads.topology.device.usable_memory_bytes, loads.topology.num_devices
    best: dict[str, StrategyFigures] = {}
    everything = (0, len(loads.whole.forward))
    for k, inside in enumerate(loads.fabric(0, count, 1).choices):
        if not inside.is_by_hand:
            continue
        load = loads.load(everything, 0, count, 1, k)
        name = expert_of(inside.name)
        step_s = load.forward_s + load.backward_s + load.update_s
        memory = load.state_bytes + load.gradient_bytes + load.working_bytes
        if (name == "data_parallel" or memory <= usable) and (name not in best or step_s < best[name].step_time_s):
            serial = loads.load(everything, 0, count, 1, k, overlap=False)
            sent_bytes = int(loads.sent_bytes(everything, 0, count, 1, k).sum())
            split = loads.split_flops(everything, 0, count, 1, k)[None]
            best[name] = StrategyFigures(
                step_time_s=step_s, without_overlap_s=serial.forward_s + serial.backward_s + serial.update_s,
                split_flops_share=share_of(*split.T), memory_bytes_per_device=int(memory),
                sent_bytes=sent_bytes, feasible=memory <= usable, peak_sent_bytes=sent_bytes,
            )  # fmt: skip
    return best

"""The operator graph of a step on a part of its batch, from the graph of the whole: no tracing.

Whatever runs over a sample dim gets smaller, weights and their gradients stay. A planner asks for many numbers of
micro-batches; a plan that runs is traced at its micro-batch's size, and comes to the same sizes (tested).
"""

from __future__ import annotations

import dataclasses
import math

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.operators import NOT_SPLIT, Access, Dim, OperatorGraph, TaskMemory


def sample_divisor(graph: OperatorGraph) -> int:
    """Into how many equal parts the batch can be cut at most: what divides every dim that has it (1 where there is none)."""
    of_batch = zip(graph.operators, _of_batch(graph), strict=True)
    return math.gcd(*(d.divisor for op, is_batch in of_batch for d, has_it in zip(op.dims, is_batch, strict=True) if has_it)) or 1


def _of_batch(graph: OperatorGraph) -> list[list[bool]]:
    """Of every operator which dims have the batch: sample dims whose size is a multiple of what most data have.

    Others are of what a loss draws or gathers within examples: positions that are masked, or given, draws per example.
    """
    sizes = list(data_sizes(graph).values())
    batch = max(sizes, key=lambda n: (n > 1, sum(m % n == 0 for m in sizes), n), default=1)
    return [[d.kind == "S" and d.size % batch == 0 for d in op.dims] for op in graph.operators]


def data_sizes(graph: OperatorGraph) -> dict[int, int]:
    """The inputs (tensors) that hold data, and how many samples: what is no state, and has a sample dim."""
    state = graph.stored_leaves | {leaf for leaf, _ in graph.state_pairs}
    others = {i for i, t in enumerate(graph.tensors) if t.input_leaf >= 0 and t.input_leaf not in state}
    begun_by, sizes = graph.begun_by, dict[int, int]()
    for task in graph.tasks:
        dims = graph.operators[task.operator].dims
        for access in task.reads if task.parameter < 0 else ():
            tensor = begun_by.get(access.tensor, access.tensor)
            if tensor in others and (of := [dims[d] for d in access.dims if d != NOT_SPLIT and dims[d].kind == "S"]):
                sizes[tensor] = of[0].size
    return sizes


def require_phases(graph: OperatorGraph, lines: str = "") -> None:
    """Refuses a step that has no forward, backward and update part in this order.

    Args:
      lines: of the user's code, that show it.
    Raises: SoapjaxError.
    """
    if not graph.is_single_phase:
        return
    value = "a gradient that depends on an update, or on another gradient" if graph.parameters else "no gradient boundary"
    several = "make one gradient of one loss, or use one micro-batch and no pipeline"
    expected = "a forward, a backward and an update part: gradients by jax.grad, or by soapjax.value_and_grad"
    remedy = several if graph.parameters else "compute gradients so, or plan without a pipeline"
    raise SoapjaxError(Problem("train step", value + (f" ({lines})" if lines else ""), expected, remedy))


def _require_divisor(graph: OperatorGraph, num: int) -> None:
    """Refuses a number that does not divide the batch, and says which do."""
    whole = sample_divisor(graph)
    if num >= 1 and whole % num == 0:
        return
    fits = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
    expected, remedy = f"a divisor of the batch ({whole})", f"choose one of {fits}"
    size = max(data_sizes(graph).values(), default=0)  # not known where it is taken apart at once, as into chunks and a rest
    if whole > 1 and size != whole:
        parts = f"the batch{f' of {size}' if size else ''} is taken in parts (lax.map(..., batch_size=), a loop over chunks)"
        expected = f"a divisor of {whole}: {parts}, of which each micro-batch has whole ones"
        remedy += ", or make these parts smaller"
    if whole == 1:
        why = "a loop over single samples has not, nor one over chunks and a rest"
        why += "; what a `while` or `cond` computes of all together is in one piece"
        expected = f"a batch that can be cut: all of the step has several samples at once ({why})"
        remedy = "compute several at a time (jax.vmap, lax.map(..., batch_size=8) of a batch that 8 divides), or plan with the"
        remedy += " whole batch"
    raise SoapjaxError(Problem("microbatches", str(num), expected, remedy))


def micro_batch(graph: OperatorGraph, num: int) -> OperatorGraph:
    """The graph at one of `num` equal micro-batches.

    Raises: SoapjaxError where `num` does not divide the batch, or the step has no batch or no gradient to sum.
    """
    require_phases(graph)
    _require_divisor(graph, num)
    if num == 1:
        return graph
    is_sample, begun_by = _of_batch(graph), graph.begun_by
    shapes = [list(t.shape) for t in graph.tensors]
    shrunk: set[tuple[int, int]] = set()

    def shrink(n: int, access: Access) -> None:
        for d, dim in enumerate(access.dims):
            for tensor in {access.tensor, begun_by.get(access.tensor, access.tensor)}:
                if dim != NOT_SPLIT and is_sample[n][dim] and (tensor, d) not in shrunk:
                    shrunk.add((tensor, d))
                    shapes[tensor][d] //= num

    def share(n: int, dims: tuple[int, ...]) -> int:
        return num if any(d != NOT_SPLIT and is_sample[n][d] for d in dims) else 1

    tasks = []
    for task in graph.tasks:
        n = task.operator
        if task.parameter >= 0:
            tasks.append(task)
            continue
        for access in (*task.reads, *task.writes):
            shrink(n, access)
        tasks.append(
            task._replace(
                work=tuple(w._replace(flops=w.flops / share(n, w.dims)) for w in task.work),
                halos=tuple(h._replace(size_bytes=h.size_bytes / share(n, h.dims)) for h in task.halos),
                sums=tuple(s._replace(size_bytes=s.size_bytes / share(n, s.dims)) for s in task.sums),
                memory=_memory(task.memory, share(n, task.equations.result_dims)),
            )
        )
    operators = tuple(
        op._replace(
            dims=tuple(
                d._replace(size=d.size // num, divisor=d.divisor // num) if has_it else _of_unknown_size(d, num)
                for d, has_it in zip(op.dims, is_batch, strict=True)
            )
        )
        for op, is_batch in zip(graph.operators, is_sample, strict=True)
    )
    tensors = tuple(t._replace(shape=tuple(s)) for t, s in zip(graph.tensors, shapes, strict=True))
    return dataclasses.replace(graph, operators=operators, tasks=tuple(tasks), tensors=tensors)


def _of_unknown_size(dim: Dim, num: int) -> Dim:
    """A sample dim that is no batch's: every second sample gets fewer with the batch, positions in an example do not.

    The graph does not tell, so that it is split only as both can be.
    """
    if dim.kind != "S":
        return dim
    return dim._replace(divisor=dim.divisor // num if dim.divisor % num == 0 else 1)


def _memory(memory: TaskMemory, share: int) -> TaskMemory:
    return memory._replace(result_bytes=memory.result_bytes / share, costly_bytes=memory.costly_bytes / share)

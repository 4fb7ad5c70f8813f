"""The operator graph: plain, frozen data that knows nothing of jax.

Operators carry named iteration dims; tasks (what runs as one kernel) read and
write tensors, and say which op dim splits which tensor dim. From a choice of
"mesh axis -> dim" per operator everything else follows: local shapes, partial
sums, reshards between neighbours.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import NamedTuple

import rich.table

FORWARD, BACKWARD, UPDATE = 0, 1, 2  # phases of tasks
NOT_SPLIT = -1
HEAVY_RESULT = -1  # among `recomputed_from`: the heavy equation's own result, where it is no tensor of the graph


class Dim(NamedTuple):
    """One iteration dim. A degree must divide `divisor` (the gcd of all tensor dims that it runs over)."""

    name: str
    size: int
    divisor: int
    kind: str  # "S" sample, "A" attribute, "P" parameter
    is_reduced: bool  # contracted or summed in the forward task
    is_spatial: bool  # neighbours are read across the border of a shard


class Access(NamedTuple):
    """A tensor as one task reads or writes it.

    `dims[d]` is the op dim that splits dim d of the tensor, or NOT_SPLIT. A result is partial on the axes
    assigned to `reduced`. `operand` is the position among the heavy equation's operands (or results), -1 in a region. `trips`: how
    many values of a loop's tensor it reads at once, stacked, after the loop. `slices`: into how many slices loops take an argument
    apart, of which it reads one per trip; 0 where an older file does not say.
    """

    tensor: int
    dims: tuple[int, ...]
    reduced: tuple[int, ...] = ()
    operand: int = -1
    trips: int = 1
    slices: int = 0


class Work(NamedTuple):
    """FLOPs of one run of a part of a task, divided by the degrees of `dims`."""

    flops: float
    dims: tuple[int, ...]


class InnerSum(NamedTuple):
    """A reduction in the middle of a task: an all-reduce of `size_bytes`, split by `dims`, over the axes on `reduced`."""

    size_bytes: float
    dims: tuple[int, ...]
    reduced: tuple[int, ...]


class Halo(NamedTuple):
    """Rows of the image of a convolution that blocks get from their neighbours where one of `edges` is split."""

    size_bytes: float  # of the rows around one block, as wide as the whole image
    dims: tuple[int, ...]  # the image's other dims: what they are split into, the rows are too
    edges: tuple[int, ...]  # spatial dims, with equally many bytes each


class TaskMemory(NamedTuple):
    """What decides how long the values that a task reads and makes are kept."""

    result_bytes: float = 0.0  # of the heavy equation's first result, whether it leaves the task or not
    # Per result: the tensors from which a reader can compute it by light equations; None where it has to be stored.
    recomputed_from: tuple[tuple[int, ...] | None, ...] = ()
    choices_of: int = -1  # the image, a tensor, of which a pooling's gradient needs its choices only (pools.py)
    adds_to_sum: bool = False  # a scatter onto zeros, which its only reader adds to something (passes/tasks.py)
    costly_bytes: float = 0.0  # of what light equations make dearly of the heavy one's result: kept beside it, not computed again
    keeps_result: bool = True  # else what is costly is kept in the result's place: nothing else is computed from the latter


class TaskEquations(NamedTuple):
    """Where a task stands in the program: for who runs it, or reads what was compiled of it."""

    keys: tuple[str, ...] = ()  # left out in files
    heavy: str = ""  # key of the heavy equation, "" for a region
    # The heavy equation's operands and first result in their own shapes, whether they leave the task or not.
    operand_dims: tuple[tuple[int, ...], ...] = ()
    result_dims: tuple[int, ...] = ()


class Task(NamedTuple):
    """What the schedule orders: one heavy equation with its neighbours, one fused region, or one parameter's update.

    Its fingerprint is of all up to `trip_count`.
    """

    operator: int
    phase: int  # FORWARD, BACKWARD or UPDATE
    kind: str  # operator class for the cost: "dot", "conv", "other"
    dtype: str
    work: tuple[Work, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    sums: tuple[InnerSum, ...] = ()
    trip_count: int = 1
    scope: str = ""  # the loop that the task runs in, "" outside
    parameter: int = -1  # index of the parameter that an update task updates
    structure: str = ""  # what is computed, whatever the shapes (structure.py)
    halos: tuple[Halo, ...] = ()
    # (tensor, narrower dtype) of what the task casts before any other use: cast where it is kept, and sent as that.
    casts: tuple[tuple[int, str], ...] = ()
    memory: TaskMemory = TaskMemory()
    equations: TaskEquations = TaskEquations()

    @property
    def is_heavy(self) -> bool:
        return bool(self.equations.heavy)

    @property
    def sources(self) -> dict[int, tuple[int, ...] | None]:
        """By result, a tensor, from which ones a reader can compute it (`recomputed_from`)."""
        return dict(zip((a.tensor for a in self.writes), self.memory.recomputed_from, strict=False))


class Tensor(NamedTuple):
    """A value that crosses from one task to another, or into or out of the step."""

    value: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    copies: int  # how many of it are alive at once: loop trips for what a loop stacks
    input_leaf: int = -1
    output_leaves: tuple[int, ...] = ()
    # As which the parts of a sum are added up, where a cast follows; else "" and 0. Not part of the fingerprint.
    sum_dtype: str = ""
    sum_itemsize: int = 0

    @property
    def size_bytes(self) -> float:
        size = self.itemsize
        for n in self.shape:
            size *= n
        return float(size)

    @property
    def summed_bytes(self) -> float:
        """While the parts of a sum are added up."""
        return self.size_bytes / self.itemsize * (self.sum_itemsize or self.itemsize)


NO_GRADIENT = -1


class Parameter(NamedTuple):
    """A trained leaf: one storage layout for it, its gradient and its optimizer state (leaves of the same shape).

    A frozen one is stored alike, and has neither.
    """

    path: str
    tensor: int
    gradient: int  # NO_GRADIENT of a frozen one
    owner: int
    leaf: int
    state_leaves: tuple[int, ...]
    storage_dims: tuple[int, ...]  # dims that extra storage axes may split, best first

    @property
    def is_frozen(self) -> bool:
        return self.gradient == NO_GRADIENT

    @property
    def leaves(self) -> tuple[int, ...]:
        """Positions among the step's inputs of all that is stored alike: the parameter, then its optimizer state."""
        return (self.leaf, *self.state_leaves)


class Accumulation(NamedTuple):
    """The sum of what several uses of a parameter contribute to its gradient, as tensors.

    All are laid out like one summand of the parameter's owner, partial sums included; only the total is summed over devices.
    Those that a step makes itself, of several backward passes, need not be (`follows_storage`).
    """

    parameter: int
    summands: tuple[int, ...]
    running: tuple[int, ...]
    total: int
    is_carried: bool  # by a loop: the total is there after the loop, not after every trip
    layout_of: int  # the summand that says how it is laid out
    # Whether all are laid out as the gradient is stored where the parameter's storage scatters gradients (`Storage.is_scattering`):
    # every summand is then scattered, and no device holds a sum of all.
    follows_storage: bool = False


class JointSum(NamedTuple):
    """Products that one task adds up: those that are partial sums in the layout of the last one are summed over devices with it."""

    summands: tuple[int, ...]  # tensors, in the order in which they are made; two at least


class LoopEntry(NamedTuple):
    """The first value of a loop-carried tensor: resharded once to the layout in which the loop carries it."""

    source: int
    target: int


class UnplacedState(NamedTuple):
    """State that is no tensor and no parameter's: kept whole on every device that updates it."""

    leaf: int  # position among the step's inputs
    size_bytes: float
    operator: int  # in whose stage a pipeline keeps it


class Operator(NamedTuple):
    name: str
    kind: str
    dims: tuple[Dim, ...]
    tasks: tuple[int, ...]
    parameters: tuple[int, ...]
    group: int  # operators of one group repeat each other: same structure, same shapes
    # A user's own constraint: axis names per dim of the tensor, of a user's shard_map per dim of the operator; and their mesh.
    fixed: tuple[tuple[str, ...], ...] | None = None
    fixed_mesh: tuple[tuple[str, int], ...] = ()
    is_recomputed: bool = False  # what the backward pass reads of it is computed again there (recompute.py)


@dataclasses.dataclass(frozen=True)
class OperatorGraph:
    operators: tuple[Operator, ...]
    tasks: tuple[Task, ...]  # in schedule order
    tensors: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...]  # those that are trained, then frozen ones
    entries: tuple[LoopEntry, ...]
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    state_pairs: tuple[tuple[int, int], ...]
    is_single_phase: bool
    accumulations: tuple[Accumulation, ...] = ()
    joint_sums: tuple[JointSum, ...] = ()  # not part of the fingerprint
    leaf_of: tuple[int, ...] = ()  # by input the leaf that it is a row of, where stacked state is taken apart (trace/unstacking.py)
    unplaced: tuple[UnplacedState, ...] = ()  # not part of the fingerprint
    step_fingerprint: str = ""  # of the step's graph where nothing is recomputed, where this one recomputes something

    @property
    def recomputed(self) -> frozenset[str]:
        """The operators of which the backward pass computes again what it reads, by choice (recompute.py)."""
        return frozenset(op.name for op in self.operators if op.is_recomputed)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """The parameters but for frozen ones, by the same numbers."""
        return tuple(p for p in self.parameters if not p.is_frozen)

    @property
    def trained_leaves(self) -> frozenset[int]:
        """Positions among the step's inputs of all trained parameters and their optimizer state."""
        return frozenset(leaf for p in self.trained for leaf in p.leaves)

    @property
    def stored_leaves(self) -> frozenset[int]:
        """And of frozen parameters."""
        return frozenset(leaf for p in self.parameters for leaf in p.leaves)

    @property
    def unplaced_bytes(self) -> float:
        """Of the state that every device keeps whole, whatever the plan."""
        return sum(x.size_bytes for x in self.unplaced)

    @property
    def num_operators(self) -> int:
        return len(self.operators)

    @property
    def begun_by(self) -> dict[int, int]:
        """What a loop carries (tensors) -> the input that it begins with."""
        return {e.target: e.source for e in self.entries if self.tensors[e.source].input_leaf >= 0}

    def fingerprint(self) -> str:
        """sha256 over operators, shapes and edges: no jaxpr text, value ids or equation addresses in it.

        It is that of the step: the same whatever is recomputed.
        """
        if self.step_fingerprint:
            return self.step_fingerprint
        data = {
            "operators": [(o.name, o.kind, o.dims, o.tasks, o.parameters) for o in self.operators],
            "tasks": [
                (t.operator, t.phase, t.kind, t.dtype, t.work, *([a[:4] for a in found] for found in (t.reads, t.writes)), t.sums,
                 t.trip_count) for t in self.tasks
            ],
            "tensors": [(t.shape, t.dtype, t.copies, t.input_leaf, t.output_leaves) for t in self.tensors],
            "parameters": self.parameters,
            "accumulations": [a[:6] for a in self.accumulations],
            "paths": (self.in_paths, self.out_paths),
        }
        return hashlib.sha256(json.dumps(data, separators=(",", ":")).encode()).hexdigest()

    def table(self) -> rich.table.Table:
        table = rich.table.Table(title=f"{len(self.operators)} operators, {len(self.parameters)} parameters")
        for column in ("operator", "kind", "dims", "GFLOP", "parameters"):
            table.add_column(column)
        for op in self.operators:
            flops = sum(w.flops * self.tasks[t].trip_count for t in op.tasks for w in self.tasks[t].work)
            dims = " ".join(f"{d.name}={d.size}" for d in op.dims)
            table.add_row(op.name, op.kind, dims, f"{flops / 1e9:.3g}", str(len(op.parameters)))
        return table

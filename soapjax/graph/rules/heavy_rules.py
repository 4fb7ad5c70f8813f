"""The rules of equations with an iteration space of their own: products, windows, gathers and scatters."""

from __future__ import annotations

from soapjax.graph.rules.rule_table import BLOCKED, Labels, MadeOf, register, replicated
from soapjax.graph.trace.program import FlatEqn

SCATTERS = ("scatter-add", "scatter-sub", "scatter", "scatter-mul", "scatter-min", "scatter-max")
POOLS = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")


@register("dot_general")
def _dot_general(eqn: FlatEqn, ins, outs) -> Labels:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs: list[int | None] = [None] * len(ins[0])
    rhs: list[int | None] = [None] * len(ins[1])
    label = 0
    for i, j in zip(lb, rb, strict=True):
        lhs[i] = rhs[j] = label
        label += 1
    for dims in (lhs, rhs):
        contracted = lc if dims is lhs else rc
        for i in range(len(dims)):
            if dims[i] is None and i not in contracted:
                dims[i] = label
                label += 1
    for i, j in zip(lc, rc, strict=True):
        lhs[i] = rhs[j] = label
        label += 1
    return Labels((tuple(lhs), tuple(rhs)), (tuple(range(len(outs[0]))),))


@register("ragged_dot_general")
def _ragged_dot(eqn: FlatEqn, ins, outs) -> Labels:
    """A product whose rows meet the matrix of their group (experts side by side), and both of its gradients.

    All but the groups is split. Where a group begins is data: a block of rows meets what of each group lies in it, as it is told
    when the product runs. Of several such products in one (a `vmap`) none is split.
    """
    dn = eqn.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = dn.dot_dimension_numbers
    if lb or rb:
        return replicated(ins, outs)
    lhs, rhs = [BLOCKED] * len(ins[0]), [BLOCKED] * len(ins[1])
    rows = [d for d in range(len(lhs)) if d not in lc]
    columns = [d for d in range(len(rhs)) if d not in (*rc, *dn.rhs_group_dimensions)]
    out = [BLOCKED] * len(outs[0])
    begin = len(out) - len(rows) - len(columns)  # behind the groups, where rows are summed up per group
    for o, d in enumerate(rows, begin):
        lhs[d] = out[o] = o
    for o, d in enumerate(columns, begin + len(rows)):
        rhs[d] = out[o] = o
    for k, (i, j) in enumerate(zip(lc, rc, strict=True)):
        lhs[i] = rhs[j] = len(out) + k
    others = tuple((BLOCKED,) * len(s) for s in ins[2:])
    return Labels((tuple(lhs), tuple(rhs), *others), (tuple(out),))


def conv_results(eqn: FlatEqn, image: tuple[int, ...], kernel: tuple[int, ...]) -> list[int]:
    """The size of each spatial dim of a convolution's result."""
    p, dn = eqn.params, eqn.params["dimension_numbers"]
    found = []
    for k, ((low, high), stride) in enumerate(zip(p["padding"], p["window_strides"], strict=True)):
        n, w = image[dn.lhs_spec[2 + k]], kernel[dn.rhs_spec[2 + k]]
        dilated, window = (n - 1) * p["lhs_dilation"][k] + 1, (w - 1) * p["rhs_dilation"][k] + 1
        found.append((dilated + low + high - window) // stride + 1)
    return found


def border_rows(eqn: FlatEqn, k: int, n: int, w: int, m: int) -> tuple[int, int, tuple[int, int]]:
    """What a block of spatial dim `k` with n rows of image, w of kernel and m of result needs of its neighbours.

    One formula for the convolution and both of its gradients. In coordinates of the dilated image that begin at the block's
    own begin, its results read from -low to (m - 1) stride - low + (w - 1) rhs_dilation. That is the same for every block where
    blocks of image and result begin together, the only splits that are offered. A kernel of one position (and its gradients)
    needs nothing: its spatial dims are split as a batch dim is.

    Returns: rows of the block before, rows of the block after, and the padding of the block with them (negative where it then
      holds more than is read).
    """
    p = eqn.params
    low, dilation = p["padding"][k][0], p["lhs_dilation"][k]
    last = (m - 1) * p["window_strides"][k] - low + (w - 1) * p["rhs_dilation"][k]
    before, after = max(0, low // dilation), max(0, last // dilation - (n - 1))
    return before, after, (low - before * dilation, last - (n - 1 + after) * dilation)


@register("conv_general_dilated")
def _conv(eqn: FlatEqn, ins, outs) -> Labels:
    """Labels: 0 batch, 1 output features, 2 input features (reduced), 3.. spatial.

    Covers the forward convolution and both of its gradients, which are convolutions too: a stride becomes a dilation
    of the image (input gradient) or of the kernel (kernel gradient, where the spatial dims are reduced). A depthwise
    convolution splits its channels, group by group.
    """
    p, dn = eqn.params, eqn.params["dimension_numbers"]
    groups, batch_groups = p["feature_group_count"], p["batch_group_count"]
    lhs, rhs, out = [BLOCKED] * len(ins[0]), [BLOCKED] * len(ins[1]), [BLOCKED] * len(outs[0])
    if batch_groups == 1:
        lhs[dn.lhs_spec[0]] = out[dn.out_spec[0]] = 0
    if groups == 1:
        lhs[dn.lhs_spec[1]] = rhs[dn.rhs_spec[1]] = 2
    if groups == batch_groups == 1:
        rhs[dn.rhs_spec[0]] = out[dn.out_spec[1]] = 1
    elif groups > 1 and groups == ins[0][dn.lhs_spec[1]]:
        lhs[dn.lhs_spec[1]] = rhs[dn.rhs_spec[0]] = out[dn.out_spec[1]] = 1
    elif batch_groups > 1 and batch_groups == ins[0][dn.lhs_spec[0]]:
        lhs[dn.lhs_spec[0]] = rhs[dn.rhs_spec[0]] = out[dn.out_spec[1]] = 1
    spatial: dict[int, int] = {}
    for k, stride in enumerate(p["window_strides"]):
        n, w, m = ins[0][dn.lhs_spec[2 + k]], ins[1][dn.rhs_spec[2 + k]], outs[0][dn.out_spec[2 + k]]
        lhs_dilation, rhs_dilation = p["lhs_dilation"][k], p["rhs_dilation"][k]
        forward = lhs_dilation == rhs_dilation == 1 and w < n == m * stride and m > 1
        input_gradient = rhs_dilation == stride == 1 and w < m == n * lhs_dilation and n > 1
        kernel_gradient = lhs_dilation == stride == 1 and m < n == w * rhs_dilation and w > 1
        if forward or input_gradient:
            lhs[dn.lhs_spec[2 + k]] = out[dn.out_spec[2 + k]] = 3 + k
            limit = min(n, m) // w
        elif kernel_gradient:
            lhs[dn.lhs_spec[2 + k]] = rhs[dn.rhs_spec[2 + k]] = 3 + k
            limit = w // m
        else:
            continue
        if p["padding"][k][0] != 0 or (w > 1 and m > 1):  # a window, or the sum of a kernel gradient, crosses the edge
            spatial[3 + k] = max(1, limit)
    return Labels((tuple(lhs), tuple(rhs)), (tuple(out),), spatial)


@register(*POOLS, "select_and_gather_add")
def _reduce_window(eqn: FlatEqn, ins, outs) -> Labels:
    """Batch and channel dims pass through; windowed dims only where windows do not cross the border of a shard."""
    labels = _window_labels(eqn, ins[0], outs[0])
    inputs = tuple(labels if len(s) == len(labels) else (BLOCKED,) * len(s) for s in ins)
    return Labels(inputs, tuple(labels for _ in outs))


@register("select_and_scatter_add")
def _select_and_scatter_add(eqn: FlatEqn, ins, outs) -> Labels:
    labels = _window_labels(eqn, ins[1], ins[0])
    return Labels((labels, labels, *((BLOCKED,) * len(s) for s in ins[2:])), (labels,))


def _window_labels(eqn: FlatEqn, image: tuple[int, ...], windows: tuple[int, ...]) -> tuple[int, ...]:
    """Of the dims of an image, and of what has a value for each of its windows."""
    p, rank = eqn.params, len(image)
    dilations = (p.get(name, (1,) * rank) for name in ("base_dilation", "window_dilation"))

    def label(d: int, w: int, stride: int, padding: tuple[int, int], *dilated: int) -> int:
        untouched = w == 1 and stride == 1
        tiled = w == stride and image[d] == windows[d] * stride and windows[d] > 1
        return d if (untouched or tiled) and tuple(padding) == (0, 0) and set(dilated) == {1} else BLOCKED

    return tuple(map(label, range(rank), p["window_dimensions"], p["window_strides"], p["padding"], *dilations))


@register("gather")
def _gather(eqn: FlatEqn, ins, outs) -> Labels:
    """Labels: output dims by their position; table rows that are indexed are reduced (a masked gather, then a sum)."""
    dn, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    rank = len(outs[0])
    table = [BLOCKED] * len(ins[0])
    index = [BLOCKED] * len(ins[1])
    batching = tuple(getattr(dn, "operand_batching_dims", ()))
    index_batching = tuple(getattr(dn, "start_indices_batching_dims", ()))
    window = [d for d in range(len(ins[0])) if d not in dn.collapsed_slice_dims and d not in batching]
    for out_dim, d in zip(dn.offset_dims, window, strict=True):
        if sizes[d] == ins[0][d]:
            table[d] = out_dim
    batch_dims = [d for d in range(rank) if d not in dn.offset_dims]
    index_dims = list(range(len(ins[1]) - 1))  # the last dim of the indices is the index vector
    for out_dim, d in zip(batch_dims, index_dims, strict=True):
        index[d] = out_dim
    for d, i in zip(batching, index_batching, strict=True):
        table[d] = index[i]
    out = tuple(d if d in batch_dims or d in table else BLOCKED for d in range(rank))
    if len(dn.start_index_map) == 1 and dn.start_index_map[0] in dn.collapsed_slice_dims:
        table[dn.start_index_map[0]] = rank
    made_of = tuple(MadeOf(0, d, 0, b) for d in dn.start_index_map for b in batch_dims if d in dn.collapsed_slice_dims)
    return Labels((tuple(table), tuple(index)), (out,), made_of=made_of)


@register(*SCATTERS)
def _scatter(eqn: FlatEqn, ins, outs) -> Labels:
    """Labels: operand dims by position, then the scattered dims of the updates (reduced, for sums only).

    Rows that updates are added to are split too: each part takes those that fall into it.
    """
    dn = eqn.params["dimension_numbers"]
    operand_shape, update_shape = ins[0], ins[2]
    rank = len(operand_shape)
    operand = [BLOCKED] * rank
    index, update = [BLOCKED] * len(ins[1]), [BLOCKED] * len(update_shape)
    batching = tuple(getattr(dn, "operand_batching_dims", ()))
    index_batching = tuple(getattr(dn, "scatter_indices_batching_dims", ()))
    window = [d for d in range(rank) if d not in dn.inserted_window_dims and d not in batching]
    for u, d in zip(dn.update_window_dims, window, strict=True):
        if update_shape[u] == operand_shape[d]:
            operand[d] = update[u] = d
    scattered = [u for u in range(len(update_shape)) if u not in dn.update_window_dims]
    is_sum = eqn.name in ("scatter-add", "scatter-sub")
    for k, (u, i) in enumerate(zip(scattered, range(len(ins[1]) - 1), strict=True)):
        if i in index_batching:
            d = batching[index_batching.index(i)]
            operand[d] = index[i] = update[u] = d
        elif is_sum:
            index[i] = update[u] = rank + k
    if is_sum:
        for d in set(dn.scatter_dims_to_operand_dims) & set(dn.inserted_window_dims):
            operand[d] = d
    return Labels((tuple(operand), tuple(index), tuple(update)), (tuple(operand),))

"""A step written for a mesh of explicit axes (`AxisType.Explicit`) as one that the plan lays out.

Under such a mesh every type says how its value lies, equations are told how their results shall (`out_sharding`), and
`jax.sharding.reshard` changes it. Here the types lose their layouts, and what the step asks for itself stays as the constraint that
`with_sharding_constraint` would be on a mesh of automatic axes:

    h:f32[16@data,32] = dot_general[out_sharding=P(data, None)] x w      h:f32[16,32] = dot_general x w
    k:f32[16@data,32] = reshard[dst_sharding=P(data, None)] h       ->   i:f32[16,32] = sharding_constraint[P(data, None)] h
    l:f32[16@data,32] = tanh k                                           l:f32[16,32] = tanh i
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core as jex_core
from jax.sharding import AxisType, NamedSharding

from soapjax.graph.trace.one_program import in_nested
from soapjax.helpers.own_config import NO_MESH

_LAYOUTS = "sharding", "out_sharding"  # parameters that say how a result lies
_CASTS = {"mesh_cast"}  # of a type alone


def without_layouts(closed: Any, mesh: jax.sharding.Mesh) -> Any:
    """A ClosedJaxpr that was traced under `mesh`, without the layouts of its types."""
    automatic = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return closed.replace(jaxpr=_Rewriting(automatic).jaxpr(closed.jaxpr))


class _Rewriting:
    def __init__(self, mesh: jax.sharding.Mesh):
        self.mesh = mesh

    def jaxpr(self, jaxpr: Any) -> Any:
        found: dict[Any, Any] = {v: jex_core.Var(_plain(v.aval)) for v in (*jaxpr.constvars, *jaxpr.invars)}
        own = {"constvars": [found[v] for v in jaxpr.constvars], "invars": [found[v] for v in jaxpr.invars]}

        def read(atom: Any) -> Any:
            return jex_core.Literal(atom.val, _plain(atom.aval)) if isinstance(atom, jex_core.Literal) else found[atom]

        eqns = []
        for eqn in jaxpr.eqns:
            invars = [read(a) for a in eqn.invars]
            asked = eqn.params.get("dst_sharding" if eqn.primitive.name == "reshard" else "out_sharding")
            if eqn.primitive.name in _CASTS or eqn.primitive.name == "reshard":
                found[eqn.outvars[0]] = invars[0]
            else:
                found.update({v: jex_core.Var(_plain(v.aval)) for v in eqn.outvars})
                outvars = [found[v] for v in eqn.outvars]
                params = {k: self._param(k, v) for k, v in eqn.params.items()}
                eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params, ctx=_without_mesh(eqn.ctx)))
            if isinstance(asked, NamedSharding) and any(part is not None for part in asked.spec):
                made = found[eqn.outvars[0]]
                constraint = self._constraint(made, asked.spec)
                found[eqn.outvars[0]] = kept = jex_core.Var(made.aval)
                eqns.append(constraint.replace(invars=[made], outvars=[kept], source_info=eqn.source_info))
        return jaxpr.replace(eqns=eqns, outvars=[read(v) for v in jaxpr.outvars], **own)

    def _constraint(self, value: Any, spec: Any) -> Any:
        """An equation that constrains such a value."""
        sharding = NamedSharding(self.mesh, spec)
        shape = jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)
        with jax.sharding.use_abstract_mesh(NO_MESH):
            (eqn,) = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(shape).eqns
        return eqn

    def _param(self, name: str, value: Any) -> Any:
        return None if name in _LAYOUTS else NO_MESH if name == "ctx_mesh" else in_nested(value, self.jaxpr)


def _plain(aval: Any) -> Any:
    """A type without its layout; as it is, where it is none of an array."""
    if not isinstance(aval, jax.core.ShapedArray):
        return aval
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _without_mesh(ctx: Any) -> Any:
    """What an equation remembers of where it was traced, but for the mesh; as it is, where that was a place of its own."""
    if ctx.compute_type is not None or ctx.xla_metadata:
        return ctx
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return type(ctx)()

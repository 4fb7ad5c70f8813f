"""XLA's compiler for CPUs, as read off the programs of jaxlib 0.10.2.

* All gradients are summed by one instruction, one after the other, each with a latency of its own (measured:
  scripts/cluster_table.py): nothing is saved by merging them, and no sum is written over its operand.
* Barriers are taken out before equal instructions are merged: what would be gathered or computed again is kept.
* What is bfloat16 in the step is float32 in between, in collectives too.
* The running sum of a gradient over micro-batches is another buffer than the product that is added to it.
"""

from soapjax.costs.compilers.compiler_model import CompilerModel

CPU = CompilerModel(
    name="XLA for CPUs", read_on="0.10.2", adds_in_place=False, keeps_barriers=False, widened=frozenset(["bfloat16"])
)

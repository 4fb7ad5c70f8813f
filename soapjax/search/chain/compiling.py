"""When the chains' programs are compiled: beside the descents, or after them.

They take five seconds or so of a core, and tracing them keeps Python from all other threads. A search of a fixed number of
proposals ends soonest where that begins at once. One of few has judged them all by then, and compiles none: perturbations find as
much with 300 to 8,000 proposals as chains do behind them (AlexNet, RNNLM, NMT on 16 P100 and 8 A100: -1.8 to +0.3 % of the cost,
means of three seeds). One that time may end is asked for the best soon: there it begins when descents and perturbations have come
to their end, or as late as chains still have their share of the time. On NMT and 4 GPUs such a search is within 1 % of the best
known cost after 3.7 s instead of 4.8, RNNLM on 16 after 5.1 instead of 8.4.

Of a step of many equal blocks a search of a fixed number of proposals compiles none. Descents have split all blocks alike
(shortening.py), and chains move one block at a time: of 48 and 96 layers they find 0.00 to 0.05 %, less than simplicity takes back.
"""

from __future__ import annotations

from soapjax.jit.beside import Beside
from soapjax.search.chain.engine import Engine, engine_of
from soapjax.search.descent.shortening import shortened
from soapjax.search.problem import Budget, PlanningProblem

COMPILING = 3.3  # times as long as the simulator's programs those of the chains take to compile, while descents run
# At least. Two fast cores take five seconds, but with chains in searches of 14 s (2.8 times, 5 s) ResNet-101 on 8 A100 and BERT on
# 64 came out 0.5 and 1.1 % slower: without, perturbations have more of the time.
COMPILING_S = 8.0
READY_BY = 0.5  # of the budget's seconds, if compiled from the beginning, or chains are left out
OF_A_DESCENT = 20_000  # proposals at the most, of a few hundred operators: no chains walk in a search of fewer
CHAINS_FROM = 0.7  # of the budget's seconds: until when starts may descend and be perturbed


def chain_programs(engine: Engine, budget: Budget) -> Beside[None] | None:
    """Their compiling, for a search that has time for chains, and is of use to them."""
    if budget.seconds is None or budget.num_proposals is not None:
        is_few = budget.num_proposals is not None and budget.num_proposals < OF_A_DESCENT
        return None if is_few or shortened(engine.problem) is not None else Beside(engine.prepare)
    engine.problem.simulator.prepare()
    compile_s = max(COMPILING * engine.problem.simulator.compile_s, COMPILING_S)
    if compile_s > READY_BY * budget.seconds:
        return Beside(engine.prepare) if engine.is_at_hand() else None
    return Beside(engine.prepare, CHAINS_FROM - compile_s / budget.seconds)


def prepare_chains(problem: PlanningProblem, budget: Budget) -> None:
    """Begins before the search what would begin with it, beside what else is to be done before."""
    if not problem.space.offers_pins and (programs := chain_programs(engine_of(problem), budget)) is not None:
        programs.begin_by(0.0)

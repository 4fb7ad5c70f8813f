"""When the chains' programs are compiled: beside the descents, or after them.

They take ten seconds or so of a core, and tracing them keeps Python from all other threads. A search of a fixed number of
proposals ends soonest where that begins at once. One that time may end is asked for the best soon: there it begins when
descents and perturbations have come to their end, or as late as chains still have their share of the time. On NMT and 4 GPUs such
a search is within 1 % of the best known cost after 3.7 s instead of 4.8, RNNLM on 16 after 5.1 instead of 8.4.
"""

from __future__ import annotations

from concurrent.futures import Future

from soapjax.jit.programs import threads
from soapjax.search.chain.engine import Engine, engine_of
from soapjax.search.problem import Budget, PlanningProblem

COMPILING = 3.3  # times as long as the simulator's programs those of the chains take to compile, while descents run
COMPILING_S = 8.0  # at least, where the simulator's come from disk: on two cores at 3 GHz or so
READY_BY = 0.5  # of the budget's seconds, if compiled from the beginning, or chains are left out
CHAINS_FROM = 0.7  # of the budget's seconds: until when starts may descend and be perturbed


class ChainPrograms:
    """The programs of one search, compiled in a thread from `begin` on.

    Args:
      latest: the share of the budget after which `begin_by` does not put it off.
    """

    def __init__(self, engine: Engine, latest: float):
        self.latest, self._engine = latest, engine
        self._compiled: Future[None] | None = None

    def begin(self) -> None:
        if self._compiled is None:
            pool = threads(1)
            self._compiled = pool.submit(self._engine.prepare)
            pool.shutdown(wait=False)

    def begin_by(self, spent: float) -> None:
        """Begins if so much of the budget is spent that there is no time to lose."""
        if spent >= self.latest:
            self.begin()

    @property
    def is_ready(self) -> bool:
        """Whether chains can walk."""
        return self._compiled is not None and self._compiled.done()

    @property
    def is_compiling(self) -> bool:
        return self._compiled is not None and not self._compiled.done()

    def wait(self) -> None:
        self.begin()
        self._compiled.result()


def chain_programs(engine: Engine, budget: Budget) -> ChainPrograms | None:
    """Those of a search that has time for chains."""
    if budget.seconds is None or budget.num_proposals is not None:
        return ChainPrograms(engine, 0.0)
    engine.problem.simulator.prepare()
    compile_s = max(COMPILING * engine.problem.simulator.compile_s, COMPILING_S)
    if compile_s > READY_BY * budget.seconds:
        return ChainPrograms(engine, 0.0) if engine.is_at_hand() else None
    return ChainPrograms(engine, CHAINS_FROM - compile_s / budget.seconds)


def prepare_chains(problem: PlanningProblem, budget: Budget) -> None:
    """Begins before the search what would begin with it, beside what else is to be done before."""
    if not problem.space.offers_pins and (programs := chain_programs(engine_of(problem), budget)) is not None:
        programs.begin_by(0.0)

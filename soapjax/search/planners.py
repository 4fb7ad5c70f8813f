"""All planners by name."""

from __future__ import annotations

import difflib

from soapjax.errors import Problem, SoapjaxError
from soapjax.jit.array_types import Array
from soapjax.search.chain.mcmc_planner import mcmc
from soapjax.search.chain.paper_chain import mcmc_paper
from soapjax.search.experts.baselines import BASELINES
from soapjax.search.experts.convolutions import expert_cnn
from soapjax.search.experts.layered import layered_expert, single_device
from soapjax.search.experts.placement import model_parallel, placement_error
from soapjax.search.experts.recurrent import expert_rnn
from soapjax.search.problem import Budget, Planner, PlanningProblem, SearchResult
from soapjax.search.proofs.branch_and_bound import exhaustive
from soapjax.search.relaxation.dynamic_program import optcnn
from soapjax.search.relaxation.integer_program import ilp
from soapjax.strategy.space import has_pins


def _learned(name: str) -> Planner:
    """One of the planners with networks, whose libraries take a quarter of a second to import: done when it plans."""

    def planner(key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
        from soapjax.search.learned import learned_planners

        return getattr(learned_planners, name)(key, problem, budget)

    return planner


# They put operators on single devices: only in a space that offers pins.
PLACEMENT_PLANNERS: dict[str, Planner] = {
    "single_device": single_device, "model_parallel": model_parallel, "layered_expert": layered_expert, "expert_rnn": expert_rnn,
    **{name: _learned(name) for name in ("reinforce", "hierarchical", "trinity")},
}  # fmt: skip

PLANNERS: dict[str, Planner] = {
    "mcmc": mcmc, **BASELINES, "expert_cnn": expert_cnn, "optcnn": optcnn, "ilp": ilp, "exhaustive": exhaustive,
    "mcmc_paper": mcmc_paper, **PLACEMENT_PLANNERS,
}  # fmt: skip


def get_planner(name: str, *, space: str = "paper") -> Planner:
    """The planner called `name`; given a `space`, only if it plans in the space of that name.

    Raises: SoapjaxError listing the valid names, or naming the space that the planner needs.
    """
    if name not in PLANNERS:
        close = difflib.get_close_matches(name, PLANNERS, 1)
        hint = f"did you mean {close[0]!r}" if close else "choose one of these"
        raise SoapjaxError(Problem("planner", repr(name), " or ".join(PLANNERS), hint))
    if not has_pins(space) and name in PLACEMENT_PLANNERS:
        raise placement_error(name)
    return PLANNERS[name]

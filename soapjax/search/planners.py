"""All planners by name."""

from __future__ import annotations

import difflib

from soapjax.errors import Problem, SoapjaxError
from soapjax.search.baselines import BASELINES
from soapjax.search.exhaustive import exhaustive
from soapjax.search.experts import expert_cnn
from soapjax.search.ilp import ilp
from soapjax.search.mcmc import mcmc
from soapjax.search.mcmc_paper import mcmc_paper
from soapjax.search.optcnn import optcnn
from soapjax.search.placement import model_parallel, placement_error
from soapjax.search.policy_gradient import reinforce
from soapjax.search.problem import Planner
from soapjax.search.recurrent import expert_rnn
from soapjax.strategy.space import has_pins

# They put operators on single devices: only in a space that offers pins.
PLACEMENT_PLANNERS: dict[str, Planner] = {"model_parallel": model_parallel, "expert_rnn": expert_rnn, "reinforce": reinforce}

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

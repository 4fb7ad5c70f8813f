"""All planners by name."""

from __future__ import annotations

import difflib

from soapjax.errors import Problem, SoapjaxError
from soapjax.search.baselines import BASELINES
from soapjax.search.exhaustive import exhaustive
from soapjax.search.experts import expert_cnn
from soapjax.search.ilp import ilp
from soapjax.search.mcmc import mcmc
from soapjax.search.optcnn import optcnn
from soapjax.search.problem import Planner

PLANNERS: dict[str, Planner] = {
    "mcmc": mcmc, **BASELINES, "expert_cnn": expert_cnn, "optcnn": optcnn, "ilp": ilp, "exhaustive": exhaustive,
}  # fmt: skip


def get_planner(name: str) -> Planner:
    """The planner called `name`.

    Raises: SoapjaxError listing the valid names.
    """
    if name not in PLANNERS:
        close = difflib.get_close_matches(name, PLANNERS, 1)
        hint = f"did you mean {close[0]!r}" if close else "choose one of these"
        raise SoapjaxError(Problem("planner", repr(name), " or ".join(PLANNERS), hint))
    return PLANNERS[name]

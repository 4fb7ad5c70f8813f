"""Lines of the user's own code: where an error or an equation comes from."""

from __future__ import annotations

import functools
import os
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from soapjax.helpers.files import OWN_FOLDER

Frame = tuple[str, int | None, str]  # file, line, function


class Call(NamedTuple):
    """A call of a function that is traced on its own; `name` is that of a jitted one."""

    source_info: Any
    name: str


_PATHS = sysconfig.get_paths()
_OWN = os.path.join(OWN_FOLDER, "")
# Neither the standard library nor what is installed; this package may lie elsewhere.
_NOT_THE_USERS = tuple(os.path.join(os.path.realpath(_PATHS[k]), "") for k in ("stdlib", "purelib", "platlib")) + (_OWN,)


def line_of_error(e: BaseException) -> str:
    """The innermost line of the user's own code that an exception came through: "train.py:12 in loss_fn"; "" for none."""
    frames = traceback.extract_tb(e.__traceback__)
    return _shown((f.filename, f.lineno, f.name) for f in reversed(frames))


def line_of_caller() -> str:
    """As `line_of_error`, of the call that is running."""
    return _shown((f.filename, f.lineno, f.name) for f in reversed(traceback.extract_stack()))


def line_of_equation(source_info: Any, calls: Sequence[Call] = ()) -> str:
    """As `line_of_error`, of a jaxpr equation's source info.

    Args:
      calls: the calls that the equation is within, outermost first. JAX traces a jitted function (`jnp.var`, say) once: what is in
        it carries the lines of its first call, or none.
    """
    frame = _frame(source_info, calls)
    return "" if frame is None else _shown([frame])


def _frame(source_info: Any, calls: Sequence[Call]) -> Frame | None:
    """The innermost of the user's frames that an equation, within such calls, comes from."""
    recorded = getattr(source_info, "traceback", None)
    frames = [] if recorded is None else [(f.file_name, f.line_num, f.function_name) for f in recorded.frames]
    mine = [frame for frame in frames if _is_users(frame[0])]
    call = _frame(calls[-1].source_info, calls[:-1]) if calls else None
    if call is None or call in mine:
        return mine[0] if mine else None
    # Traced in an earlier call, from elsewhere: its own lines are right where the function is the user's.
    is_users = any(function.rpartition(".")[2] == calls[-1].name for _, _, function in mine)
    return mine[0] if is_users else call


@functools.cache  # the same few files again and again: the file system is asked once for each
def _is_users(file: str) -> bool:
    return not file.startswith("<") and not os.path.realpath(file).startswith(_NOT_THE_USERS)


def _shown(frames: Iterable[Frame]) -> str:
    for file, line, function in frames:
        if _is_users(file):
            here = os.path.join(os.getcwd(), "")
            return f"{os.path.realpath(file).removeprefix(here)}:{line} in {function.rpartition('.')[2]}"
    return ""

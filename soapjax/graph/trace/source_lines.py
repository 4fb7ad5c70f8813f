"""Lines of the user's own code: where an error or an equation comes from."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable
from typing import Any

from soapjax.helpers.files import OWN_FOLDER

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


def line_of_equation(source_info: Any) -> str:
    """As `line_of_error`, of a jaxpr equation's source info."""
    recorded = getattr(source_info, "traceback", None)
    if recorded is None:
        return ""
    return _shown((f.file_name, f.line_num, f.function_name) for f in recorded.frames)


def _shown(frames: Iterable[tuple[str, int | None, str]]) -> str:
    for file, line, function in frames:
        path = os.path.realpath(file)
        if not file.startswith("<") and not path.startswith(_NOT_THE_USERS):
            here = os.path.join(os.getcwd(), "")
            return f"{path.removeprefix(here)}:{line} in {function.rpartition('.')[2]}"
    return ""

"""Which functions may make a model, and finding them.

A name comes from a command line, or from a plan that the user trusts. It leads to a factory only where the function is
written in the named module itself, and the module is the user's own: under the working folder, one of soapjax's models, or of an
installed package that declares factories. All that can be known without importing is checked before anything is imported.

An installed package declares the modules that have factories as entry points (setup.cfg of the package):

    [options.entry_points]
    soapjax.models =
        any_name = my_package.training

Then `my_package.training:make`, and whatever lies below `my_package.training`, may be named.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.files import OWN_FOLDER

OWN_MODELS = "soapjax.models"
DECLARED_BY = "soapjax.models"  # the group of entry points


def find_factory(path: str) -> Callable[..., Any]:
    """The function that `package.module` (its `make`) or `package.module:factory` names.

    Raises: SoapjaxError where there is none, where it may not be one, or where its module does not import.
    """
    module_name, _, name = path.partition(":")
    name, place = name or "make", f"model {path}"
    if not is_within(module_name, OWN_MODELS):
        folder = _working_folder(place)
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        _check_module(module_name, folder, place)
    else:
        _find_own_models()
    module = _imported(module_name, place)
    found = vars(module).get(name)
    if not callable(found):
        names = [n for n, v in vars(module).items() if not n.startswith("_") and is_written_in(v, module)]
        close = difflib.get_close_matches(name, names, 3) or names[:5]
        raise SoapjaxError(
            Problem(place, f"no function {name!r}", "a factory in that module", f"it has {', '.join(close) or 'none'}")
        )
    if not is_written_in(found, module):
        expected = f"a function that is written in {module_name} itself"
        kind = f"{type(found).__name__} {name!r} of {getattr(found, '__module__', None) or 'no module'}"
        raise SoapjaxError(Problem(place, kind, expected, "name the module that has the factory"))
    return found


def is_within(name: str, parent: str) -> bool:
    """Whether a dotted name is `parent` or below it."""
    return name == parent or name.startswith(parent + ".")


def is_written_in(value: Any, module: ModuleType) -> bool:
    """Whether a value is a Python function, decorated or not, whose text is in the module: not one that it imported."""
    if not callable(value) or isinstance(value, type):
        return False
    try:
        function = inspect.unwrap(value)
    except ValueError:  # it wraps itself
        return False
    return inspect.isfunction(function) and function.__globals__ is vars(module) and function.__module__ == module.__name__


def _working_folder(place: str) -> Path:
    try:
        return Path(os.getcwd()).resolve()
    except OSError as e:
        raise SoapjaxError(Problem(place, f"no working folder: {e.strerror}", "a folder that exists", "change to one")) from None


def _check_module(name: str, folder: Path, place: str) -> None:
    """Raises: SoapjaxError where a module is none, or nobody's own. Imports nothing."""
    where = _places(name)
    if not where and name.partition(".")[0] not in sys.stdlib_module_names:
        parts = name.split(".")
        missing = next(m for m in (".".join(parts[: k + 1]) for k in range(len(parts))) if not _places(m))
        before, _, last = missing.rpartition(".")
        meant = ""
        if before and missing == name and _places(before):  # a file name, or a dot in the place of a colon
            meant = before if last == "py" else f"{before}:{last}"
        raise _not_importable(place, f"No module named {missing!r}", meant)
    own_models = OWN_FOLDER.parent / "models"  # of a checkout
    is_ours = is_within(name, "models") and not _is_installed(own_models) and all(p.is_relative_to(own_models) for p in where)
    is_here = all(p.is_relative_to(folder) and not _is_installed(p) for p in where)
    if where and (is_ours or is_here or any(is_within(name, d) for d in _declared(folder))):
        return
    expected = f"a module under the working folder, or of an installed package that declares factories ({DECLARED_BY})"
    remedy = "run it where your module lies, or declare the module as an entry point of its package (docs/planning.md)"
    raise SoapjaxError(Problem(place, str(where[0]) if where else "a module of the standard library", expected, remedy))


def _not_importable(place: str, value: str, meant: str = "") -> SoapjaxError:
    own = f"soapjax's own are e.g. {OWN_MODELS}.mlp"
    remedy = f"did you mean {meant}; {own}" if meant else f"write package.module or package.module:factory; {own}"
    return SoapjaxError(Problem(place, value, "a module importable from the working folder", remedy))


def _places(name: str) -> list[Path]:
    """Files or folders that a module would be imported from; none where there are none, or it is built in."""
    spec, full = None, ""
    for part in name.split("."):
        locations = None if spec is None else spec.submodule_search_locations
        if full and locations is None:
            return []
        full = f"{full}.{part}" if full else part
        if full in sys.modules:
            spec = getattr(sys.modules[full], "__spec__", None)
        elif locations is None:
            spec = importlib.util.find_spec(full)
        else:
            spec = importlib.machinery.PathFinder.find_spec(full, list(locations))
        if spec is None:
            return []
    if spec.has_location and spec.origin:
        return [Path(spec.origin).resolve()]
    return [Path(p).resolve() for p in spec.submodule_search_locations or ()]


@functools.cache
def _installed_folders() -> tuple[Path, ...]:
    paths = [sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({Path(p).resolve() for p in paths})


def _is_installed(path: Path) -> bool:
    """Whether a file was put there by an installer, in an environment under the working folder perhaps, or is soapjax's."""
    is_library = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(is_library) or any(path.is_relative_to(p) for p in (*_installed_folders(), OWN_FOLDER))


def _declared(folder: Path) -> list[str]:
    """Modules that installed packages declare; what merely lies in the working folder declares nothing for others."""
    found = []
    for entry in importlib.metadata.entry_points(group=DECLARED_BY):
        at = Path(str(entry.dist.locate_file(""))).resolve() if entry.dist is not None else folder
        if _is_installed(at) or not at.is_relative_to(folder):
            found.append(entry.value.partition(":")[0].strip())
    return found


def _imported(name: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as e:  # the user's own code may raise anything; its words are passed on
        remedy = f"run python -c 'import {name}' to see the error"
        raise SoapjaxError(Problem(place, f"{type(e).__name__}: {str(e)[:200]}", "a module that imports", remedy)) from None


def _find_own_models() -> None:
    """Makes `soapjax.models` importable in a checkout, even one that is only on PYTHONPATH: it is the folder beside the package."""
    folder = OWN_FOLDER.parent / "models"
    if OWN_MODELS in sys.modules or (OWN_FOLDER / "models").is_dir() or not folder.is_dir():
        return
    path, locations = folder / "__init__.py", [str(folder)]
    spec = importlib.util.spec_from_file_location(OWN_MODELS, path, submodule_search_locations=locations)
    module = importlib.util.module_from_spec(spec)
    sys.modules[OWN_MODELS] = module
    spec.loader.exec_module(module)

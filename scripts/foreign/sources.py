"""Imports of public code that lies in a folder of sources, one folder `owner+name` for each repository.

Nothing of it is changed. Its imports of data pipelines and loggers that are not installed become empty stand-ins. Where a step
stands inside a script's main block or in a notebook, the definitions that are wanted are written to a temporary module by name
(`pieces`), so that nothing else of the script runs.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import shutil
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

# Names of what steps do not need: data, logs, plots, other frameworks.
STUBS = (
    "tensorflow tensorflow.io tensorflow.compat.v2 tensorflow_datasets tensorflow_text tensorflow_probability torch "
    "torch.utils torch.utils.data torch.nn torch.nn.functional torch.utils.tensorboard torchvision torchvision.transforms "
    "torchtext wandb tqdm.auto matplotlib matplotlib.pyplot matplotlib.cm matplotlib.animation matplotlib.colors sklearn "
    "sklearn.metrics sklearn.preprocessing sklearn.datasets clu.metric_writers clu.periodic_actions clu.deterministic_data "
    "clu.preprocess_spec clu.platform flax.metrics.tensorboard gym gym.spaces gymnasium gymnasium.spaces "
    "gymnasium.spaces.box cv2 grain grain.python sentencepiece kagglehub datasets stable_baselines3 "
    "stable_baselines3.common.buffers stable_baselines3.common.atari_wrappers envpool tensorboardX pandas imageio PIL.Image "
    "seaborn mpl_toolkits mpl_toolkits.axes_grid1 omegaconf hydra pygame"
    " tensorflow_gan tensorflow_hub jax.experimental.host_callback"
).split()
# Slow, or not needed, even where installed.
NEVER_REAL = ("tensorflow", "clu.", "flax.metrics", "sklearn", "matplotlib", "mpl_toolkits", "seaborn")
_folder = Path(".")
_counter = itertools.count()


def use(folder: Path) -> None:
    """The folder of sources that everything below is read from."""
    global _folder
    _folder = Path(folder).resolve()


def path_of(name: str) -> Path:
    return _folder / name


@contextlib.contextmanager
def stubs(*more: str) -> Iterator[None]:
    """Stand-ins for modules that are not installed, and in any case for `more`, for as long as something is imported."""
    made: dict[str, types.ModuleType | None] = {}
    for name in dict.fromkeys((*STUBS, *more)):
        if name in sys.modules and name not in more:
            continue
        try:
            is_real = not name.startswith(NEVER_REAL) and name not in more and importlib.util.find_spec(name) is not None
        except (ImportError, ValueError, AttributeError):
            is_real = False
        if not is_real:
            made[name] = sys.modules.get(name)
            spec = importlib.machinery.ModuleSpec(name, None)
            # SciPy asks whatever is named torch whether its numbers are of its class.
            sys.modules[name] = mock.MagicMock(name=name, __spec__=spec, __path__=[], Tensor=type("Tensor", (), {}))
    try:
        yield
    finally:
        for name, real in made.items():
            sys.modules.pop(name, None)
            if real is not None:
                sys.modules[name] = real


def forget_flags() -> None:
    """Scripts define absl flags of the same names: those before are removed."""
    from absl import flags

    for name in list(flags.FLAGS):
        if not flags.FLAGS.find_module_defining_flag(name, "absl").startswith("absl"):
            delattr(flags.FLAGS, name)


def load(folder: str, main: str, *others: str, stand_ins: Sequence[str] = ()) -> types.ModuleType:
    """The module `main` of a folder of the sources; its neighbours `others` are imported first, by their plain names.

    A folder's `models` is not another folder's: they are forgotten afterwards.
    """
    forget_flags()
    names = {main, *others, "models", "utils"}
    ours = {n: sys.modules.pop(n) for n in list(sys.modules) if n.split(".")[0] in names}
    sys.path.insert(0, str(path_of(folder)))
    try:
        with stubs(*stand_ins):
            for name in others:
                importlib.import_module(name)
            return importlib.import_module(main)
    finally:
        sys.path.remove(str(path_of(folder)))
        for n in [n for n in sys.modules if n.split(".")[0] in names]:
            sys.modules.pop(n)
        sys.modules.update(ours)


def package(folder: str, name: str, stand_ins: Sequence[str] = ()) -> types.ModuleType:
    """A module by its dotted name in a package whose parent is `folder`; it stays imported."""
    forget_flags()
    sys.path.insert(0, str(path_of(folder)))
    try:
        with stubs(*stand_ins):
            return importlib.import_module(name)
    finally:
        sys.path.remove(str(path_of(folder)))


def edited(path: str, edits: Sequence[tuple[str, str]], stand_ins: Sequence[str] = ()) -> types.ModuleType:
    """A file as a module, with names that newer versions of a library changed put right, nothing else."""
    text = _put_right(path_of(path).read_text(), edits, path)
    sys.path.insert(0, str(path_of(path).parent))
    try:
        return _written(text, Path(path).stem, {}, stand_ins)
    finally:
        sys.path.remove(str(path_of(path).parent))


def pieces(
    path: str, names: Sequence[str], given: Mapping[str, Any] | None = None, *, edits: Sequence[tuple[str, str]] = (),
    without: Sequence[str] = (), stand_ins: Sequence[str] = (),
) -> types.ModuleType:  # fmt: skip
    """The imports of a script or notebook, and the definitions `names` wherever they stand in it, as a module.

    Args:
      names: of classes, functions and assigned variables, taken in the order of the file; "*" stands for every class and
        function at the top level.
      given: what they read and the script would have made (parsed arguments, a network, an environment).
      without: imports (by a part of their text) that are left out.
    """
    tree = ast.parse(_put_right(_code(path_of(path)), edits, path))
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    imports = [n for n in imports if not any(w in ast.unparse(n) for w in (*without, "from __future__"))]
    found: dict[str, ast.stmt] = {}
    for node in ast.walk(tree):
        for name in _defined(node):
            if name in names:
                found.setdefault(name, node)  # the outermost comes first
    if "*" in names:
        found |= {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    if missing := [n for n in names if n not in found and n != "*"]:
        raise LookupError(f"{path} no longer defines {', '.join(missing)}")
    wanted = sorted({id(n): n for n in found.values()}.values(), key=lambda n: n.lineno)
    # Annotations as text: some name what is no longer a type.
    made = "\n".join(["from __future__ import annotations", *(ast.unparse(n) for n in (*imports, *wanted))])
    return _written(made, Path(path).stem, given or {}, stand_ins)


def _put_right(text: str, edits: Sequence[tuple[str, str]], path: str) -> str:
    for old, new in edits:
        if old not in text:
            raise LookupError(f"{path} no longer has {old!r}")
        text = text.replace(old, new)
    return text


def _defined(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.Assign):
        targets = [x for t in node.targets for x in (t.elts if isinstance(t, ast.Tuple) else [t])]
        return tuple(t.id for t in targets if isinstance(t, ast.Name))
    return ()


def _code(path: Path) -> str:
    """A script's text; of a notebook its code cells, without what is the shell's."""
    text = path.read_text()
    if path.suffix != ".ipynb":
        return text
    cells = ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    return "\n\n".join("\n".join(line for line in c.splitlines() if not line.lstrip().startswith(("%", "!"))) for c in cells)


def _written(text: str, stem: str, given: Mapping[str, Any], stand_ins: Sequence[str]) -> types.ModuleType:
    """A module from text, by way of a file: frames, pickles and dataclasses find it as they find any other."""
    folder = Path(tempfile.mkdtemp(prefix="foreign-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    name = f"foreign_{stem.replace('-', '_')}_{next(_counter)}"
    file = folder / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    vars(module).update(given)
    sys.modules[name] = module
    with stubs(*stand_ins):
        spec.loader.exec_module(module)
    vars(module).update(given)
    return module


def plain(fn: Any) -> Any:
    """What was wrapped by jit, pmap, nnx.jit or filter_jit."""
    while hasattr(fn, "__wrapped__"):
        fn = fn.__wrapped__
    return fn


def without_collectives(module: types.ModuleType) -> types.ModuleType:
    """A step written for pmap as the one program that it stands for: pmean and psum over the batch are the value itself."""
    import jax

    def same(x, *args, **kwargs):
        return x

    lax = types.SimpleNamespace(**{n: getattr(jax.lax, n) for n in dir(jax.lax) if not n.startswith("__")})
    lax.pmean = lax.psum = lax.all_gather = same
    lax.axis_index = lambda name: 0
    shadow = types.ModuleType("jax_without_collectives")
    shadow.__getattr__ = lambda name: getattr(jax, name)
    shadow.lax, shadow.pmap = lax, lambda f, *args, **kwargs: f
    module.jax = shadow
    if hasattr(module, "lax"):
        module.lax = lax
    return module


def old_names() -> None:
    """Names that JAX has dropped, for code that was written before."""
    import jax
    import jax.numpy as jnp

    for name, value in {"tree_map": jax.tree.map, "tree_leaves": jax.tree.leaves, "tree_multimap": jax.tree.map}.items():
        setattr(jax, name, value)
    jnp.DeviceArray = jax.Array
    if not hasattr(jax, "util"):
        jax.util = types.SimpleNamespace(safe_zip=zip, safe_map=map, cache=lambda: functools.cache)


@contextlib.contextmanager
def frozen_init() -> Iterator[None]:
    """Flax as it was when `init` returned a FrozenDict."""
    import flax

    module = flax.linen.Module
    init = module.init
    module.init = lambda self, *args, **kwargs: flax.core.freeze(init(self, *args, **kwargs))
    try:
        yield
    finally:
        module.init = init

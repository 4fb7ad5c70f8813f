"""Data flows one way: every package imports only those before it, read off the syntax trees."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Package -> the packages of soapjax that it may import, besides itself; errors and helpers are free for all.
MAY_IMPORT = {
    "helpers": set(),
    "graph": set(),
    "jit": set(),
    "topology": set(),
    "strategy": {"graph", "topology"},
    "additive": {"topology"},
    "costs": {"graph", "topology", "strategy", "jit"},
    "simulate": {"graph", "topology", "strategy", "jit", "costs"},
    "search": {"graph", "topology", "strategy", "jit", "costs", "simulate"},
    "execute": {"graph", "topology", "strategy"},
    "report": {"strategy", "simulate"},
}
FREE_FOR_ALL = {"errors", "helpers"}
# Where the halves meet: may import all.
AT_THE_TOP = {"__init__", "__main__", "api", "cli", "distributed", "planning", "steps"}
# Rooms of `execute`, from the bottom: each may import those before it.
ROOMS_OF_EXECUTE = ("transfers", "spmd", "parts", "streams")


def sources(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path):
    """`soapjax.graph.passes.build` for soapjax/graph/passes/build.py; a package's own name for its __init__."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(tree, package):
    """Every import, inside functions and for type checkers too: the absolute module, and the names taken from it.

    Relative imports are resolved against `package`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name, ()) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - (node.level - 1)]
                base = ".".join([*above, base] if base else above)
            yield base, tuple(a.name for a in node.names)


def imported(tree, package):
    """Absolute names of all that a module imports: `from a import b` gives "a" and "a.b", since b may be a module."""
    return [name for base, names in statements(tree, package) for name in (base, *(f"{base}.{n}" for n in names))]


def package_of(path):
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def imports_of(path):
    return imported(ast.parse(path.read_text()), package_of(path))


def circles(statements_of):
    """The groups of modules that import one another, given every module's imports.

    `from a import b` is an import of the module a.b where there is one, and of a otherwise.
    """
    edges = {
        m: {x for base, names in found for x in (
            [f"{base}.{n}" if f"{base}.{n}" in statements_of else base for n in names] or [base]
        ) if x in statements_of and x != m}
        for m, found in statements_of.items()
    }  # fmt: skip

    def reached(module):
        seen, left = set(), [module]
        while left:
            new = edges[left.pop()] - seen
            seen |= new
            left += new
        return seen

    reach = {m: reached(m) for m in edges}
    return {frozenset(n for n in reach[m] if m in reach[n]) for m in edges if m in reach[m]}


def is_within(name, package):
    return name == package or name.startswith(package + ".")


def forbidden(package, names):
    """What `package` must not import of soapjax."""
    allowed = {f"soapjax.{p}" for p in MAY_IMPORT[package] | FREE_FOR_ALL | {package}}
    return sorted(n for n in names if n.startswith("soapjax.") and not any(is_within(n, a) for a in allowed))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_those_before_it(package):
    wrong = {module_name(p): found for p in sources(f"soapjax/{package}") if (found := forbidden(package, imports_of(p)))}
    assert not wrong


def test_every_module_has_its_place_in_the_table():
    names = {p.relative_to(ROOT / "soapjax").parts[0].removesuffix(".py") for p in sources("soapjax")}
    assert names <= MAY_IMPORT.keys() | FREE_FOR_ALL | AT_THE_TOP


def test_errors_know_no_other_module():
    assert not [n for n in imports_of(ROOT / "soapjax" / "errors.py") if is_within(n, "soapjax")]


@pytest.mark.parametrize("room", ROOMS_OF_EXECUTE)
def test_a_room_of_the_executor_imports_only_those_before_it(room):
    above = [f"soapjax.execute.{r}" for r in ROOMS_OF_EXECUTE[ROOMS_OF_EXECUTE.index(room) + 1 :]]
    names = {module_name(p): imports_of(p) for p in sources(f"soapjax/execute/{room}")}
    assert not [(module, n) for module, found in names.items() for n in found if any(is_within(n, a) for a in above)]


def test_no_circle_of_imports():
    """Not even one hidden by an import inside a function, or for type checkers only."""
    paths = [*sources("soapjax"), *sources("models")]
    found = circles({module_name(p): [*statements(ast.parse(p.read_text()), package_of(p))] for p in paths})
    assert not found


def test_circles_are_found():
    def of(**texts):
        return circles({name.replace("_", "."): [*statements(ast.parse(text), "p")] for name, text in texts.items()})

    lazy, typed = "def f():\n    import p.a", "if TYPE_CHECKING:\n    from p.a import A"
    for back in (lazy, typed, "from p import a", "from . import a", "from .a import A"):
        assert of(p="", p_a="from p.b import B", p_b="from p.c import C", p_c=back) == {frozenset({"p.a", "p.b", "p.c"})}
    assert of(p="from p.a import A", p_a="from p import b", p_b="") == set()
    assert of(p="from p.a import A", p_a="from p import B") == {frozenset({"p", "p.a"})}


def test_soapjax_and_the_models_do_not_know_each_other():
    own = ("models", "soapjax.models")  # in the source tree, and installed
    assert not {module_name(p) for p in sources("soapjax") if any(is_within(n, o) for n in imports_of(p) for o in own)}
    assert not {module_name(p) for p in sources("models") if any(is_within(n, "soapjax") for n in imports_of(p))}


def test_models_import_one_another_under_either_name():
    """As `models` in a checkout, as `soapjax.models` installed."""
    absolute = {p.name: [n for n in imported(ast.parse(p.read_text()), "") if is_within(n, "models")] for p in sources("models")}
    assert not any(absolute.values())


def test_private_jax_is_in_one_module_at_most():
    def uses_private(path):
        tree = ast.parse(path.read_text())
        if any(is_within(n, "jax._src") or is_within(n, "jaxlib._src") for n in imported(tree, "")):
            return True
        attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "_src"]
        return any(isinstance(n.value, ast.Name) and n.value.id in ("jax", "jaxlib") for n in attributes)

    assert sum(map(uses_private, sources("soapjax"))) <= 1
    assert not any(map(uses_private, sources("models")))


def test_nothing_unpickles_or_evaluates_text():
    """A plan or topology file can hold data only."""
    modules = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
    wrong = []
    for path in (*sources("soapjax"), *sources("models")):
        tree = ast.parse(path.read_text())
        wrong += [(module_name(path), n) for n in imported(tree, "") if n.split(".")[0] in modules]
        called = [n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        wrong += [(module_name(path), n) for n in called if n in ("eval", "exec", "compile", "__import__")]
    assert not wrong


@pytest.mark.parametrize(
    "package, text, found",
    [
        ("execute", "from soapjax.costs import tables", ["soapjax.costs", "soapjax.costs.tables"]),
        ("execute", "from soapjax import costs", ["soapjax.costs"]),
        ("execute", "from ..search.mcmc import step", ["soapjax.search.mcmc", "soapjax.search.mcmc.step"]),
        ("execute", "def f():\n    import soapjax.simulate.event", ["soapjax.simulate.event"]),
        ("execute", "from soapjax.graph.rules.light_rules import labels_of\nimport soapjax.errors\nfrom . import spmd", []),
        ("report", "from soapjax.costs.tables import CostTables", ["soapjax.costs.tables", "soapjax.costs.tables.CostTables"]),
    ],
)
def test_the_check_sees_what_it_must(package, text, found):
    assert forbidden(package, imported(ast.parse(text), f"soapjax.{package}")) == found


def test_the_package_gives_all_its_names_and_imports_no_jax_by_itself():
    import soapjax

    assert sorted(soapjax._HOMES) == sorted(soapjax.__all__) == sorted(n for n in dir(soapjax) if n in soapjax.__all__)
    assert all(getattr(soapjax, name) is not None for name in soapjax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        soapjax.nothing
    ask = "import sys, soapjax.__main__, soapjax.cli; print([m for m in ('jax', 'numpy', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"


def test_commands_import_no_libraries_that_few_of_them_need():
    """Networks' and models' libraries, and SciPy's optimisers: a second of every command, were they imported by all."""
    ask = "import sys, soapjax.cli.commands; print([m for m in ('flax', 'optax', 'scipy.optimize') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"

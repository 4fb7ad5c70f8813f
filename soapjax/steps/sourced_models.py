"""Models by name: `package.module` (its `make`) or `package.module:factory`; factories.py says which may be named.

`soapjax.models.mlp` is one of soapjax's own, anywhere; in a checkout, where they lie in the folder `models/`, it is `models.mlp`
too. A factory returns `(train_step, state, batch)`. For planning it is evaluated abstractly, so that no parameter
is allocated, whatever the size; but one whose step closes over arrays that it made is called for real.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pydantic

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.trace.closures import holds_tracers
from soapjax.graph.trace.source_lines import line_of_error
from soapjax.helpers.garbage import fewer_collections
from soapjax.steps.factories import OWN_MODELS, find_factory
from soapjax.strategy.plan import ModelSource

Setting = bool | int | float | str


class Model(NamedTuple):
    """A step with its example arguments: shapes only, or real arrays."""

    source: ModelSource
    step: Callable[..., Any]
    arguments: tuple[Any, ...]


def parse_settings(pairs: Iterable[str]) -> dict[str, Setting]:
    """`key=value` texts; values are numbers, true/false, or words.

    Raises: SoapjaxError naming every text that is none.
    """
    settings: dict[str, Setting] = {}
    problems = []
    for pair in pairs:
        key, found, text = pair.partition("=")
        if not found or not key.isidentifier():
            problems.append(Problem(f"--set {pair}", repr(pair), "key=value", "write e.g. --set layers=12"))
            continue
        try:
            value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
        except (json.JSONDecodeError, RecursionError, ValueError):
            value = text
        if isinstance(value, bool | int | str) or (isinstance(value, float) and value == value and abs(value) != float("inf")):
            settings[key] = value
        else:
            problems.append(Problem(f"--set {pair}", repr(text), "a finite number, true, false or a word", "give one value"))
    if problems:
        raise SoapjaxError(problems)
    return settings


def model_source(path: str, pairs: Iterable[str], *, place: str = "model") -> ModelSource:
    """What a user names: a model, and `key=value` texts.

    Raises: SoapjaxError naming every text that is none.
    """
    settings = parse_settings(pairs)
    try:
        return ModelSource(path=path, settings=settings)
    except pydantic.ValidationError as e:
        problems = []
        for error in e.errors():
            of_path = error["loc"][0] == "path"
            at = place if of_path else f"--set {error['loc'][1]}"
            expected = "package.module or package.module:factory" if of_path else error["msg"]
            remedy = f"soapjax's own are e.g. {OWN_MODELS}.mlp" if of_path else "give another value"
            problems.append(Problem(at[:200], repr(error["input"])[:200], expected, remedy))
        raise SoapjaxError(problems) from None


def setting_pairs(settings: dict[str, Setting]) -> list[str]:
    """`key=value` texts that `parse_settings` reads as these settings."""
    pairs = []
    for key, value in settings.items():
        plain = value if isinstance(value, str) else json.dumps(value)
        try:
            read = parse_settings([f"{key}={plain}"])[key]
            is_same = (type(read), read) == (type(value), value)
        except SoapjaxError:
            is_same = False
        pairs.append(f"{key}={plain if is_same else json.dumps(value, ensure_ascii=False)}")
    return pairs


@fewer_collections()
def abstract_model(source: ModelSource) -> Model:
    """The model with shapes in place of arrays.

    Raises: SoapjaxError where the module, the factory or a setting does not exist, or the factory fails.
    """
    factory = _factory(source)
    made: dict[str, Any] = {}

    def evaluate() -> Any:
        result = _checked(source, factory(**source.settings))
        made["step"] = result[0]
        return result[1:]

    arguments = _guarded(source, lambda: jax.eval_shape(evaluate))
    if holds_tracers(made["step"]):  # arrays that the factory made, of which nothing but their shapes is there
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            model = concrete_model(source)
        return model._replace(arguments=jax.tree.map(_struct, model.arguments))
    return Model(source, made["step"], tuple(arguments))


def _struct(x: Any) -> Any:
    typed = jax.typeof(x)
    return jax.ShapeDtypeStruct(typed.shape, typed.dtype, weak_type=typed.weak_type)


def concrete_model(source: ModelSource) -> Model:
    """The model with real arrays."""
    factory = _factory(source)
    result = _guarded(source, lambda: _checked(source, factory(**source.settings)))
    return Model(source, result[0], tuple(result[1:]))


def with_arrays(model: Model) -> Model:
    """An abstract model with real arrays, in its own trees.

    A factory makes its static parts anew at every call (the `apply_fn` of a `TrainState`), and trees that hold
    other ones are others to JAX.

    Raises: SoapjaxError where the factory makes other arrays the second time.
    """
    made = concrete_model(model.source)
    abstract, structure = jax.tree.flatten(model.arguments)
    leaves = jax.tree.leaves(made.arguments)
    before, after = ([tuple(jax.numpy.shape(x)) for x in xs] for xs in (abstract, leaves))
    if before != after:
        value, expected = f"arrays of {len(after)} shapes, others than before", "the same shapes at every call"
        problem = Problem(f"model {model.source.path}", value, expected, "let the factory depend on its arguments only")
        raise SoapjaxError(problem)
    # In the types that JAX gives them, whatever is enabled later.
    typed = [x if isinstance(x, jax.Array) else np.asarray(x, a.dtype) for x, a in zip(leaves, abstract, strict=True)]
    return model._replace(arguments=jax.tree.unflatten(structure, typed))


def _checked(source: ModelSource, result: Any) -> tuple[Any, ...]:
    if not isinstance(result, tuple) or len(result) < 2 or not callable(result[0]):
        raise SoapjaxError(
            Problem(f"model {source.path}", f"a factory that returned {type(result).__name__}", "(train_step, state, batch)",
                    "return the step function first, then its example arguments")
        )  # fmt: skip
    step, *arguments = result
    if not _takes(step, arguments):
        value = f"a step that takes {inspect.signature(step)}, and {len(arguments)} argument{'s' * (len(arguments) > 1)} for it"
        remedy = "return as many example arguments as the step takes"
        if len(arguments) == 1 and isinstance(arguments[0], tuple | list) and _takes(step, arguments[0]):
            remedy = "return the arguments one by one behind the step, not as one tuple"
        raise SoapjaxError(Problem(f"model {source.path}", value, "(train_step, state, batch)", remedy))
    return result


def _takes(step: Callable[..., Any], arguments: Sequence[Any]) -> bool:
    """Whether a function can be called with so many arguments, as far as it tells."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _guarded(source: ModelSource, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except SoapjaxError:
        raise
    except (Exception, SystemExit) as e:  # the user's own code may raise anything; its words are passed on
        message = str(e).strip().split("\n")[0][:300]
        line = line_of_error(e)
        place, value = f"model {source.path}" + (f", {line}" if line else ""), f"{type(e).__name__}: {message}"
        expected, remedy = "a factory that runs with these settings", f"check --set; settings: {source.settings}"
        if isinstance(e, jax.errors.JAXTypeError):
            # It is called for shapes alone at first: no array has values then.
            expected = "a factory that decides nothing by values of JAX arrays: it is traced for shapes, and nothing is computed"
            remedy = "compute such values with NumPy, or leave jax.jit, float(), if and np.asarray on JAX arrays out of it"
        raise SoapjaxError(Problem(place, value, expected, remedy)) from e


def _factory(source: ModelSource) -> Callable[..., Any]:
    """The source's function, which takes all settings."""
    factory = find_factory(source.path)
    parameters = inspect.signature(factory).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        unknown = [k for k in source.settings if k not in parameters]
        if unknown:
            raise SoapjaxError(
                Problem(f"model {source.path}: --set {k}", repr(source.settings[k]), f"one of {', '.join(parameters)}",
                        "correct the name")
                for k in unknown
            )  # fmt: skip
    return factory

"""A step's arguments by position, as `jax.jit` takes them: keywords, keyword-only parameters, constants, memory to give away.

Planning and executing know positions alone. A call `step(state, batch=b, lr=0.1)` of `step(state, batch, *, lr)` is one of three
positions; what of it does not hang on arrays (which parameters are constants, their values, the names of the last positions) is its
`CallForm`. Calls of one form and shape share a plan.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from soapjax.errors import Problem, SoapjaxError


class CallForm(NamedTuple):
    """What is constant of a call."""

    positions: tuple[int, ...] = ()  # of compile-time constants, parameters left out among them
    values: tuple[Any, ...] = ()  # of the constants that were given
    names: tuple[str, ...] = ()  # of the last positions, where the function takes these by keyword only

    def dynamic(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments that are no constants."""
        return tuple(a for i, a in enumerate(args) if i not in self.positions) if self.positions else args

    def dynamic_positions(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Where positions of arguments stand among those that are no constants."""
        return tuple(sorted(p - sum(q < p for q in self.positions) for p in set(positions) - set(self.positions)))


class Calling:
    """How a function may be called.

    Args:
      fn: the user's function.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as for `jax.jit`; None: not given.
    Raises: SoapjaxError naming every name that the function has no parameter for.
    """

    def __init__(
        self, fn: Callable[..., Any], *, static_argnums: Sequence[int] = (), static_argnames: Sequence[str] = (),
        donate_argnums: Sequence[int] | None = None, donate_argnames: Sequence[str] | None = None,
    ):  # fmt: skip
        self.fn = fn
        try:
            self._signature = inspect.signature(fn)
        except (TypeError, ValueError):
            self._signature = None
        parameters = [] if self._signature is None else list(self._signature.parameters.values())
        self.named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._static, self._static_names = self._both(static_argnums, static_argnames, "static_argnames", parameters)
        self.gives_away = donate_argnums is not None or donate_argnames is not None
        self._donated, self._donated_names = self._both(
            donate_argnums or (), donate_argnames or (), "donate_argnames", parameters
        )  # fmt: skip
        self.has_constants = bool(self._static or self._static_names)

    def _both(
        self, numbers: Sequence[int], names: Sequence[str], option: str, parameters: list[inspect.Parameter]
    ) -> tuple[set[int], set[str]]:
        known = {p.name for p in parameters}
        takes_any = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
        unknown = [n for n in names if n not in known and not takes_any]
        if unknown:
            expected = f"names among {', '.join(sorted(known))}"
            raise SoapjaxError(Problem(option, ", ".join(map(repr, unknown)), expected, "correct the name"))
        return {*numbers, *(self.named.index(n) for n in names if n in self.named)}, {n for n in names if n not in self.named}

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], CallForm]:
        """The arguments by position, and the form of the call.

        Where a keyword comes after parameters that were left out, these take their defaults, as constants.
        """
        if not kwargs and not self.has_constants:
            return args, CallForm()
        left_out: list[int] = []
        extra: dict[str, Any] = {}
        if kwargs:
            if self._signature is None:
                args, extra = args, dict(kwargs)
            else:
                args, extra, left_out = self._by_position(args, kwargs)
        names = tuple(sorted(extra))
        static = {i + len(args) if i < 0 else i for i in self._static}
        static |= {len(args) + k for k, n in enumerate(names) if n in self._static_names}
        args = (*args, *(extra[n] for n in names))
        positions = tuple(sorted({i for i in static if 0 <= i < len(args)} | set(left_out)))
        form = CallForm(positions, tuple(args[i] for i in positions if i not in left_out), names)
        try:
            hash(form)
        except TypeError:
            shown = [(self.named[i] if i < len(self.named) else f"argument {i}") for i in positions if not _is_hashable(args[i])]
            expected, remedy = "a hashable value", "pass a tuple or a frozen dataclass, or make it no static argument"
            raise SoapjaxError(Problem(f"static argument {n}", "not hashable", expected, remedy) for n in shown) from None
        return args, form

    def _by_position(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[int]]:  # fmt: skip
        """Positional arguments, those by keyword only, and the positions that were left out."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as e:
            name, remedy = getattr(self.fn, "__name__", "the step"), "correct the call"
            raise SoapjaxError(Problem(f"{name}: arguments", str(e), f"{name}{self._signature}", remedy)) from None
        extra: dict[str, Any] = {}
        for p in self._signature.parameters.values():
            if p.kind is p.KEYWORD_ONLY and p.name in bound.arguments:
                extra[p.name] = bound.arguments.pop(p.name)
            elif p.kind is p.VAR_KEYWORD:
                extra |= bound.arguments.pop(p.name, {})
        given = [i for i, name in enumerate(self.named) if name in bound.arguments]
        left_out = [i for i in range(max(given, default=-1)) if i not in given]
        for i in left_out:
            bound.arguments[self.named[i]] = self._signature.parameters[self.named[i]].default
        positional = [bound.arguments[self.named[i]] for i in sorted(given + left_out)]
        rest = next((p.name for p in self._signature.parameters.values() if p.kind is p.VAR_POSITIONAL), None)
        return (*positional, *bound.arguments.get(rest, ())), extra, left_out

    def function(self, form: CallForm, count: int) -> Callable[..., Any]:
        """The user's function of `count` positions, the last ones those that `form` names."""
        if not form.names:
            return self.fn
        fn, names, first = self.fn, form.names, count - len(form.names)

        @functools.wraps(fn)
        def by_position(*args: Any) -> Any:
            return fn(*args[:first], **dict(zip(names, args[first:], strict=True)))

        named = [*(self.named[i] if i < len(self.named) else f"arg{i}" for i in range(first)), *names]
        by_position.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in named])  # type: ignore[attr-defined]
        return by_position

    def given_away(self, form: CallForm, count: int) -> tuple[int, ...] | None:
        """Positions, among arguments that are no constants, whose memory the caller gives away; None where nothing is said."""
        if not self.gives_away:
            return None
        first = count - len(form.names)
        wanted = {i + count if i < 0 else i for i in self._donated}
        wanted |= {first + k for k, n in enumerate(form.names) if n in self._donated_names}
        return form.dynamic_positions(i for i in wanted if 0 <= i < count)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def listed(value: Any) -> tuple[Any, ...]:
    """An option of `jax.jit` that is one value or several."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)

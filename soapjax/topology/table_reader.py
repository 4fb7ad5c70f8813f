"""Reads plain tables (from TOML or JSON) and gathers everything that is wrong with them.

A `TableReader` hands out the values of one table, checked; what is missing or
wrong becomes a `Problem` in a list shared by all readers of the document, and
the caller goes on with a stand-in, so that one run reports every mistake.

>>> problems = []
>>> reader = TableReader({"latency_us": -3}, "x.toml: levels[0]", problems)
>>> stand_in = reader.figure("latency", LATENCY_UNITS)
>>> reader.finish()  # unknown keys become problems too
>>> print(*problems)
x.toml: levels[0].latency_us: got -3; expected a positive finite number. Remedy: give latency_us as such a number.

A *figure* is a number whose unit is part of its key: `bandwidth_gbytes_per_s`
and `bandwidth_bytes_per_s` are the same figure, `bandwidth` is a mistake.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from soapjax.errors import Problem
from soapjax.helpers.file_numbers import LARGEST


class KeyUnit(NamedTuple):
    """A suffix of a key, and how many of the base unit one of it is."""

    suffix: str
    scale: Fraction
    least: float = 0.0  # in base units: what a figure may be
    most: float = LARGEST


# The first unit of each list is the one that remedies propose; the last one is the base unit.
MEMORY_UNITS = (KeyUnit("gib", Fraction(2**30)), KeyUnit("bytes", Fraction(1)))
RATES, TIMES_S, SHARES = (1.0, 1e24), (1e-15, 1e6), (1e-6, 1.0)  # no step has a time in float32 beyond these
BANDWIDTH_UNITS = (KeyUnit("gbytes_per_s", Fraction(10**9), *RATES), KeyUnit("bytes_per_s", Fraction(1), *RATES))
LATENCY_UNITS = (KeyUnit("us", Fraction(1, 10**6), *TIMES_S), KeyUnit("s", Fraction(1), *TIMES_S))
PEAK_UNITS = (KeyUnit("tflops_per_s", Fraction(10**12), *RATES), KeyUnit("flops_per_s", Fraction(1), *RATES))
FRACTION_UNITS = (KeyUnit("fraction", Fraction(1), *SHARES),)

MAX_NAME_CHARACTERS = 200
_MISSING = object()


def shown(value: Any) -> str:
    """A short text of any value, however deep or long it is."""
    try:
        return reprlib.repr(value)
    except (RecursionError, ValueError):  # ValueError: an integer of too many digits
        return f"a very large {type(value).__name__}"


class TableReader:
    """Hands out the checked values of one table; see the module's docstring."""

    def __init__(self, table: Any, place: str, problems: list[Problem], *, separator: str = "."):
        self._place, self._problems, self._separator = place, problems, separator
        self._known: list[str] = []  # keys that belong here: proposed where an unknown key resembles one
        self._keys_of_stem: dict[str, list[str]] = {}  # the keys of each figure, by the part before the unit
        self._read: set[str] = set()  # keys of the table that were used, or complained about
        self._table: Mapping[Any, Any] = table if isinstance(table, Mapping) else {}
        self.is_table = isinstance(table, Mapping)
        if not self.is_table:
            problems.append(Problem(place, shown(table), "a table of keys and values", "write it as a table"))

    def at(self, key: str) -> str:
        """Where `key` is, for the reader of an error."""
        return f"{self._place}{self._separator}{key}"

    def report(self, key: str, value: str, expected: str, remedy: str) -> None:
        self._problems.append(Problem(self.at(key), value, expected, remedy))

    def _take(self, key: str, expected: str, remedy: str, default: Any = _MISSING) -> Any:
        self._known.append(key)
        self._read.add(key)
        if key in self._table:
            return self._table[key]
        if default is _MISSING and self.is_table:
            self.report(key, "nothing", expected, remedy)
        return default

    def text(self, key: str, *, default: Any = _MISSING, max_characters: int = 10_000) -> str:
        """A string that is not empty."""
        value = self._take(key, "a text", f'add {key} = "..."', default)
        if value is _MISSING:
            return ""
        if not isinstance(value, str) or not value.strip() or len(value) > max_characters:
            self.report(key, shown(value), f"a text of 1 to {max_characters} characters", f'write {key} = "..."')
            return ""
        return value

    def name(self, key: str) -> str:
        """A text that is short and printable."""
        value = self.text(key, max_characters=MAX_NAME_CHARACTERS)
        if not value.isprintable():
            self.report(key, shown(value), "a text of one line", "remove the control characters")
        return value

    def boolean(self, key: str, *, default: Any = _MISSING) -> bool:
        value = self._take(key, "true or false", f"add {key} = true or {key} = false", default)
        if value is not _MISSING and not isinstance(value, bool):
            self.report(key, shown(value), "true or false", f"write {key} = true or {key} = false")
        return value is True

    def count(self, key: str, *, at_most: int) -> int:
        """A whole number from 1 to `at_most`."""
        value = self._take(key, f"a whole number from 1 to {at_most}", f"add {key} = ...")
        if value is _MISSING:
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
            self.report(key, shown(value), f"a whole number from 1 to {at_most}", f"write {key} = ..., without quotes")
            return 1
        return value

    def number(
        self, key: str, *, unit: KeyUnit = KeyUnit("", Fraction(1), SHARES[0]), at_most: float = math.inf, default: Any = _MISSING
    ) -> float:  # fmt: skip
        """A positive finite number in base units: `2.5` of a unit of 10**9 is exactly 2.5e9."""
        least, most = float(unit.least / unit.scale), min(float(unit.most / unit.scale), at_most)
        limit = f", at most {at_most:g}" if at_most < math.inf else ""
        expected = f"a positive finite number{limit}"
        value = self._take(key, expected, f"add {key} = ...", default)
        if value is _MISSING:
            return 1.0
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.report(key, shown(value), expected, f"write {key} as a number, without quotes")
            return 1.0
        try:
            # by way of the decimal text, so that 3 us is the float 3e-06 and not its neighbour
            result = float(Fraction(repr(float(value))) * unit.scale) if math.isfinite(value) else math.nan
        except (OverflowError, ValueError):
            result = math.nan
        if math.isfinite(result) and 0.0 < value <= at_most and not unit.least <= result <= unit.most:
            self.report(key, shown(value), f"{expected}, {least:g} to {most:g}", f"correct {key}, or its unit")
            return 1.0
        if not (math.isfinite(result) and 0.0 < value <= at_most and result > 0.0):
            share = "write a share of 1, such as 0.8 for 80 percent"
            self.report(key, shown(value), expected, share if at_most == 1.0 else f"give {key} as such a number")
            return 1.0
        return result

    def figure(self, stem: str, units: tuple[KeyUnit, ...], *, at_most: float = math.inf) -> float:
        """The figure `stem`, in base units, from whichever of its keys (`stem_unit`) is there."""
        key_of = {f"{stem}_{u.suffix}": u for u in units}
        unit = self.unit_key(stem, key_of)
        if unit is None:
            return 1.0
        return self.number(unit, unit=key_of[unit], at_most=at_most)

    def unit_key(self, stem: str, keys: Mapping[str, KeyUnit]) -> str | None:
        """Which of the `keys` of one figure is there; None, and a problem, where none is."""
        names = list(keys)
        self._known.extend(names)
        self._keys_of_stem[stem] = names
        present = [k for k in names if k in self._table]
        if len(present) > 1:
            self._read.update(present)
            self.report(present[1], f"both {' and '.join(present)}", "one of them", f"keep {present[0]} only")
        if present:
            return present[0]
        if stem in self._table:
            self._read.add(stem)
            self.report(
                stem, shown(self._table[stem]), "a key that says the unit", f"rename it to {' or '.join(names)}, in that unit"
            )
        elif self.is_table:
            self.report(names[0], "nothing", "a positive finite number", f"add {' or '.join(names)}")
        return None

    def table(self, key: str) -> TableReader:
        """The reader of the table under `key`."""
        value = self._take(key, "a table", f"add the table [{key}]")
        reader = TableReader({} if value is _MISSING else value, self.at(key), self._problems)
        reader.is_table = value is not _MISSING and reader.is_table  # what is absent as a whole is one problem, not ten
        return reader

    def tables(self, key: str, *, at_most: int) -> list[TableReader]:
        """The readers of the array of tables under `key`; from one to `at_most`."""
        value = self._take(key, "one table or more", f"add a table [[{key}]] for each level of links")
        if value is _MISSING:
            return []
        if not isinstance(value, list | tuple) or not value:
            self.report(key, shown(value), "one table or more", f"write [[{key}]] with two brackets, once per level")
            return []
        if len(value) > at_most:
            self.report(key, f"{len(value)} tables", f"at most {at_most}", "remove the others")
        return [TableReader(v, f"{self.at(key)}[{i}]", self._problems) for i, v in enumerate(value[:at_most])]

    def offers(self, key: str) -> bool:
        """Whether the optional `key` is there; from now on it is a known one."""
        self._known.append(key)
        return key in self._table

    def get(self, key: str) -> Any:
        """The raw value under `key`, or None."""
        return self._table.get(key)

    def finish(self) -> None:
        """Reports the keys that nobody asked for."""
        unknown = [k for k in self._table if k not in self._read and k not in self._known]
        for key in unknown[:20]:
            name = str(key)[:MAX_NAME_CHARACTERS]
            self.report(name, shown(self._table[key]), "a known key", self._remedy_for_unknown(name))
        if len(unknown) > 20:
            self.report("...", f"{len(unknown) - 20} more unknown keys", "known keys only", "remove them")

    def _remedy_for_unknown(self, key: str) -> str:
        close = difflib.get_close_matches(key, self._known, n=1)
        for stem, keys in self._keys_of_stem.items():
            if re.fullmatch(rf"{stem}_[a-z0-9]+(_per_[a-z]+)?", key):  # the figure, in a unit that is not understood
                return f"convert it and write {' or '.join(keys)}"
        if close:
            return f"write {close[0]}"
        return f"remove it; the keys are {', '.join(dict.fromkeys(self._known))}"

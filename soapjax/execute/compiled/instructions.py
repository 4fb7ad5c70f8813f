"""The text of optimised HLO as instructions: the one reader of what the compiler made.

>>> found, entry = computations('ENTRY %main {\\n  %a = f32[4]{0} parameter(0)\\n  ROOT %r = f32[4]{0} negate(%a)\\n}')
>>> found[entry][1]
Instruction(name='r', result='f32[4]{0}', opcode='negate', operands=('a',), attributes='')
"""

from __future__ import annotations

import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


class Instruction(NamedTuple):
    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


def shapes_of(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Types and dims of a shape or a tuple of shapes as HLO writes them; layouts and comments are passed over."""
    return [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _SHAPE.findall(text)]


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of every computation, in the order of the text, and the name of that which is the program."""
    found: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line and not line[0].isspace():
            header = _COMPUTATION.match(line)
            if header:
                current = found.setdefault(header.group(2), [])
                entry = header.group(2) if header.group(1) else entry
            continue
        match = _INSTRUCTION.match(line)
        if match is not None and current is not None:
            current.append(_instruction(*match.groups()))
    return found, entry


def _instruction(name: str, rest: str) -> Instruction:
    if rest.startswith("("):
        end = 1 + _closing(rest[1:])
        result, rest = rest[:end], rest[end + 1 :]
    else:
        result, _, rest = rest.partition(" ")
    opcode, _, rest = rest.partition("(")
    end = _closing(rest)
    return Instruction(name, result, opcode.strip(), tuple(re.findall(r"%([\w.\-]+)", rest[:end])), rest[end:])


def _closing(text: str) -> int:
    """Where `text` goes on behind the parenthesis that was opened before it."""
    end = text.find(")") + 1
    while end and text.count("(", 0, end) >= text.count(")", 0, end):
        end = text.find(")", end) + 1
    return end or len(text)

"""A table of rich whose cells are text: a name that looks like markup, "[red]x", stays as it is, and makes no line of its own."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import OverflowMethod, RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text


class TextTable(Table):
    @classmethod
    def of(cls, title: str, words: Sequence[str], figures: Sequence[str], *, overflow: OverflowMethod = "ellipsis") -> TextTable:
        """With columns of words, and behind them columns of figures, which stand to the right."""
        table = cls(title=title, title_justify="left")
        for column in words:
            table.add_column(column, overflow=overflow)
        for column in figures:
            table.add_column(column, justify="right", overflow=overflow)
        return table

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        plain = (Text(c.replace("\n", "\\n")) if isinstance(c, str) else c for c in cells)
        super().add_row(*plain, style=style, end_section=end_section)

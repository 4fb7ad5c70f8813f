"""A table of rich whose cells are text: a name that looks like markup, "[red]x", stays as it is, and makes no line of its own."""

from __future__ import annotations

from rich.console import RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text


class TextTable(Table):
    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        plain = (Text(c.replace("\n", "\\n")) if isinstance(c, str) else c for c in cells)
        super().add_row(*plain, style=style, end_section=end_section)

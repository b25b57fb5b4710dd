"""Tables as text: for terminals, for Markdown cells, for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence


def table(rows: Sequence[Iterable[object]], style: str = "text") -> str:
    """Rows, the first of them the header, as aligned text, as Markdown or as CSV."""
    cells = [[str(cell) for cell in row] for row in rows]
    if style == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(cells)
        return text.getvalue().rstrip("\n")
    if style == "markdown":
        cells = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
        return "\n".join(f"| {' | '.join(row)} |" for row in cells)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numbers = [all(row[i][:1] in "+-0123456789" for row in cells[1:] if row[i]) for i in range(len(widths))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numbers, strict=True)
        ).rstrip()
        for row in cells
    )

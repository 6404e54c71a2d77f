"""A table of words and numbers as plain text."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Columns as wide as they must be; the first `left` ones and the last, if it is words, to the left."""
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    words = not any(ch.isdigit() for ch in head[-1]) and any(len(row[-1]) > 14 for row in cells[1:])

    def text(row: Sequence[str]) -> str:
        last = len(row) - 1
        parts = [
            cell.ljust(width) if i < left or (i == last and words) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([text(cells[0]), "  ".join("-" * width for width in widths), *map(text, cells[1:])])

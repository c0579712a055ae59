"""Formatting of tables as CSV. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable


def format_csv(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as CSV, with a line of titles; None is an empty value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows(rows)
    return text.getvalue()

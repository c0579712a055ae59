"""Live table of the newest health report on a terminal, redrawn one to four times a second.

A window that is too small shows the worst devices and the newest log lines.
"""

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TextIO

from agent.cli.output.log import ReportPrinter, message_of
from agent.cli.output.report_table import render_report
from agent.cli.output.terminal import TextStyle, style_of
from agent.cli.output.text import clean
from agent.errors import OutputError
from agent.system.output import write_all

ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # the alternate screen, no cursor, long lines cut
LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"
HOME: Final = "\x1b[H"
END_OF_LINE: Final = "\x1b[K\r\n"
BELOW: Final = "\x1b[J"

MIN_PERIOD_S: Final = 0.25
MAX_PERIOD_S: Final = 1.0


def screen_update(text: str, height: int | None, log: Sequence[str] = ()) -> str:
    """Return the terminal output that replaces the screen's content by `text` and, below it, `log`.

    If both do not fit into `height` lines, the text is cut and the newest log lines stay.
    """
    lines = text.rstrip("\n").split("\n")
    if height is not None and len(lines) + len(log) >= height:
        log = log[-(height // 2) :]
        shown = max(0, height - 2 - len(log))
        lines = [*lines[:shown], f"  … {len(lines) - shown} more lines; enlarge the window"]
    return HOME + END_OF_LINE.join([*lines, *log]) + "\x1b[K" + BELOW


class LiveTable(ReportPrinter):
    """Thread that draws the newest report on a terminal.

    When it is closed, the screen is restored and the last table is printed below.
    """

    def __init__(
        self, stream: TextIO, style: Callable[[], TextStyle], *, head: Callable[[TextStyle], str]
    ) -> None:
        """Draw on `stream`, below the text of `head`; `style` is called each time, as windows are resized."""
        self._stream = stream
        self._style = style
        self._head = head
        self.log: deque[str] = deque(maxlen=5)
        """Log lines that are shown below the table, newest last."""
        self.output_error: OutputError | None = None
        """Error that ended the drawing because the terminal is gone; None: no error."""
        super().__init__("dh-table")

    def _run(self) -> None:
        try:
            self._write(ENTER)
            try:
                self._draw_until_closed()
            finally:
                self._write(LEAVE)
            self._write("\n".join([self._table(self._style()).rstrip("\n"), *self._log_lines(), ""]))
        except OutputError as error:
            self.output_error = error

    def _draw_until_closed(self) -> None:
        is_closed, shown = False, None
        while not is_closed:
            style = self._style()
            self._write(self._frame(style))
            drawn_at = time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._report is not shown, MAX_PERIOD_S)  # noqa: B023
                self._changed.wait_for(lambda: self._is_closed, MIN_PERIOD_S - (time.monotonic() - drawn_at))
                is_closed, shown = self._is_closed, self._report

    def _frame(self, style: TextStyle) -> str:
        """Return the screen: devices by name or, if they do not fit the window, the worst first."""
        head, log = self._head(style), self._log_lines()
        whole = head + self._table(style)
        if style.height is not None and whole.count("\n") + len(log) >= style.height:
            whole = head + self._table(style, worst_first=True)
        return screen_update(whole, style.height, log)

    def _table(self, style: TextStyle, *, worst_first: bool = False) -> str:
        report = self._report
        if report is None:
            return "no report yet\n"
        return render_report(report, style, now_s=time.time(), worst_first=worst_first)

    def _log_lines(self) -> list[str]:
        log = self.log.copy()  # other threads add lines
        return ["", *(f"  {line}" for line in log)] if log else []

    def _write(self, text: str) -> None:
        # Bypass the stream's buffer, which Python flushes at exit: a stalled terminal would hang it again.
        data = text.encode(self._stream.encoding or "utf-8", "replace")
        write_all(self._stream.fileno(), "the terminal", data)


class TableLogHandler(logging.Handler):
    """Log handler that shows warnings and errors below a live table, which would overwrite other output."""

    def __init__(self, table: LiveTable) -> None:
        super().__init__(logging.WARNING)
        self._log = table.log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.append(clean(f"{record.levelname.lower()}: {message_of(record)}"))


def live_table(colour: str, *, head: Callable[[TextStyle], str]) -> LiveTable:
    """Return a live table on standard output."""
    sys.stdout.flush()
    return LiveTable(sys.stdout, lambda: style_of(sys.stdout, colour, os.environ), head=head)

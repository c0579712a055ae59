"""Live table of the newest health report on a terminal, redrawn one to four times a second.

A window that is too small shows the worst devices and the newest log lines; arrow keys scroll, and q quits.
"""

import logging
import os
import signal
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TextIO

from agent.cli.output.log import ReportPrinter, message_of
from agent.cli.output.report_text import render_report
from agent.cli.output.terminal import TextStyle, style_of
from agent.cli.output.text import clean
from agent.errors import OutputError
from agent.system.output import write_all
from agent.system.threads.thread_start import DaemonThread, ThreadStartError

if TYPE_CHECKING:
    from agent.model.report import Report

ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # the alternate screen, no cursor, long lines cut
LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"
HOME: Final = "\x1b[H"
END_OF_LINE: Final = "\x1b[K\r\n"
BELOW: Final = "\x1b[J"

SCROLL_LINES: Final = {
    b"\x1b[A": -1, b"\x1b[B": 1, b"\x1bOA": -1, b"\x1bOB": 1, b"k": -1, b"j": 1,
    b"\x1b[5~": -10, b"\x1b[6~": 10, b" ": 10,
}  # fmt: skip
"""Number of lines by which each key scrolls the table: arrows, k, j, page up, page down, space."""

MIN_PERIOD_S: Final = 0.25
MAX_PERIOD_S: Final = 1.0


def screen_update(text: str, height: int | None, log: Sequence[str] = (), first: int = 0) -> str:
    """Return the terminal output that replaces the screen's content by `text` and, below it, `log`.

    If `text` and `log` do not fit into `height` lines, `text` is cut, and the newest lines of `log` stay. The
    shown part of `text` begins with line `first`, or with an earlier line if fewer lines than fit would
    follow.
    """
    lines = text.rstrip("\n").split("\n")
    if height is not None and len(lines) + len(log) >= height:
        log = log[-(height // 2) :]
        shown = max(0, height - 2 - len(log))
        first = max(0, min(first, len(lines) - shown))
        more = f"  … {len(lines) - shown - first} more lines; arrow keys scroll, q quits"
        lines = [*lines[first : first + shown], more]
    return HOME + END_OF_LINE.join([*lines, *log]) + "\x1b[K" + BELOW


class LiveTable(ReportPrinter):
    """Thread that draws the newest report on a terminal.

    When it is closed, the screen is restored and the last table is printed below.
    """

    def __init__(
        self,
        stream: TextIO,
        style: Callable[[], TextStyle],
        *,
        head: Callable[[TextStyle], str],
        keyboard: int | None = None,
    ) -> None:
        """Create the table on the terminal `stream`, below the text that `head` returns.

        `style` returns the present style. It is called for each drawing, because windows are resized.
        `keyboard` is the descriptor of a terminal whose keys scroll the table; None: keys do not scroll the
        table.
        """
        self._keyboard = -1 if keyboard is None else keyboard
        self._mode: list[Any] | None = None
        self._screen, self._is_shown = threading.Lock(), False  # held while the terminal is written
        self._first_line = 0
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
            self._mode = self._start_keyboard()
            with self._screen:
                self._write(ENTER)
                self._is_shown = True
            try:
                self._draw_until_closed()
            finally:
                with self._screen:
                    self._is_shown = False
                    self._restore_terminal()
            self._write("\n".join([self._table(self._style()).rstrip("\n"), *self._log_lines(), ""]))
        except OutputError as error:
            self.output_error = error

    def suspend(self) -> None:
        """Stop the process as Ctrl-Z does; when it continues, show the table again. Main thread only."""
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        with self._screen, suppress(OutputError, termios.error):
            if self._is_shown:
                self._restore_terminal()
            signal.raise_signal(signal.SIGTSTP)
            if self._is_shown:
                if self._mode is not None:
                    tty.setcbreak(self._keyboard, termios.TCSANOW)  # in the background it stops here again
                self._write(ENTER + self._frame(self._style()))
        signal.signal(signal.SIGTSTP, handler)

    def _restore_terminal(self) -> None:
        if self._mode is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._keyboard, termios.TCSANOW, self._mode)
        self._write(LEAVE)

    def _draw_until_closed(self) -> None:
        is_closed, shown, first = False, None, 0
        while not is_closed:
            with self._screen:
                self._write(self._frame(self._style()))
            drawn_at = time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self._has_news(shown, first), MAX_PERIOD_S)  # noqa: B023
                pause_s = 0.0 if self._first_line != first else MIN_PERIOD_S - (time.monotonic() - drawn_at)
                self._changed.wait_for(lambda: self._is_closed or self._first_line != first, pause_s)  # noqa: B023
                is_closed, shown, first = self._is_closed, self._report, self._first_line

    def _has_news(self, shown: "Report | None", first: int) -> bool:
        return self._is_closed or self._report is not shown or self._first_line != first

    # --- keys ----------------------------------------------------------------------------------------------

    def _start_keyboard(self) -> "list[Any] | None":
        """Set the terminal to send keys without Enter, and start a thread that reads the keys.

        Return the former mode of the terminal. Return None if the mode is unchanged: without a keyboard, or
        in the background, where reading would stop the process.
        """
        try:
            if os.tcgetpgrp(self._keyboard) != os.getpgrp():
                return None
            before = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard, termios.TCSANOW)
        except (OSError, termios.error):
            return None
        try:
            DaemonThread(partial(self._read_keys, self._keyboard), "dh-keys").start()
        except ThreadStartError:  # the table is shown without keys
            termios.tcsetattr(self._keyboard, termios.TCSANOW, before)
            return None
        return before

    def _read_keys(self, keyboard: int) -> None:
        """Read keys until the table is closed or the terminal is gone.

        Arrow keys scroll the table, and q has the effect of Ctrl-C.
        """
        with suppress(OSError):
            while (key := os.read(keyboard, 16)) and not self._is_closed:
                if key in {b"q", b"Q"}:
                    os.kill(os.getpid(), signal.SIGINT)
                elif lines := SCROLL_LINES.get(key):
                    with self._changed:
                        self._first_line = max(0, self._first_line + lines)
                        self._changed.notify_all()

    # --- text ----------------------------------------------------------------------------------------------

    def _frame(self, style: TextStyle) -> str:
        """Return the content of the screen, with devices sorted by name.

        If the devices do not fit into the window, the worst devices are first.
        """
        head, log = self._head(style), self._log_lines()
        whole = head + self._table(style)
        if style.height is not None and whole.count("\n") + len(log) >= style.height:
            whole = head + self._table(style, worst_first=True)
            # the next key upward moves at once
            most = whole.count("\n") + 2 - (style.height - min(len(log), style.height // 2))
        else:
            most = 0
        with self._changed:  # the thread of the keys changes it, too
            self._first_line = min(self._first_line, max(0, most))
            first = self._first_line
        return screen_update(whole, style.height, log, first)

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
    """Log handler that shows warnings and errors below a live table.

    Other output on the terminal would be overwritten by the table.
    """

    def __init__(self, table: LiveTable) -> None:
        super().__init__(logging.WARNING)
        self._log = table.log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.append(clean(f"{record.levelname.lower()}: {message_of(record)}"))


def live_table(colour: str, *, head: Callable[[TextStyle], str]) -> LiveTable:
    """Return a live table on standard output, below the text that `head` returns.

    `colour` is the value of ``--color``. SIGTERM and SIGHUP then end the process as Ctrl-C does, and SIGTSTP
    (Ctrl-Z) gives the terminal back while the process is stopped.
    """
    sys.stdout.flush()
    for number in (signal.SIGTERM, signal.SIGHUP):  # else the terminal stays without echo and cursor
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    table = LiveTable(
        sys.stdout, lambda: style_of(sys.stdout, colour, os.environ), head=head, keyboard=keyboard
    )
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, lambda *_: table.suspend())
    return table

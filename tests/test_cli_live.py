"""The live table on a pseudo-terminal: the newest report wins, and a stopped terminal blocks no caller."""

import fcntl
import os
import pty
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_reports import BUSY, SHRUNK, THROTTLED, device, report
from patience import PATIENCE_S

from agent.cli.output.live_table import BELOW, ENTER, HOME, LEAVE, MIN_PERIOD_S, LiveTable, screen_update
from agent.cli.output.terminal import TextStyle, can_redraw, style_of


class Terminal:
    """Both ends of a pseudo-terminal of 100 columns and 20 lines."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
        self.stream = os.fdopen(slave, "w")
        self.seen = ""
        self.tables: list[LiveTable] = []

    def read_until(self, text: str) -> str:
        """Return what was written up to `text`; the limit of the test is the timeout."""
        while text not in self.seen:
            self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def table(self, style: TextStyle | None = None) -> LiveTable:
        """Return a live table on the terminal, in `style` or the terminal's own."""
        self.tables.append(
            LiveTable(
                self.stream, lambda: style or style_of(self.stream, "never", {}), head=lambda _: "HEAD\n"
            )
        )
        return self.tables[-1]

    def close(self) -> None:
        """Close both ends; the second one when no thread draws on it any more."""
        os.close(self.master)
        for table in self.tables:
            table.close()
            table._thread.join(PATIENCE_S)
        self.stream.close()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_table_is_drawn_redrawn_and_printed_at_the_end(terminal):
    table = terminal.table()
    assert terminal.read_until("no report yet").startswith(f"{ENTER}{HOME}HEAD")
    table.show(report(device("cpu-node0")))
    assert BELOW + HOME in terminal.read_until("1 device: 1 healthy")
    table.show(report(device("cpu-node0", SHRUNK)))
    terminal.read_until("1 device: 1 unhealthy")
    table.log.append("warning: something")
    table.close()
    terminal.read_until(LEAVE)
    assert "worker-7  1 device: 1 unhealthy" in terminal.read_until("warning: something")


def test_burst_of_reports_shows_the_newest_and_few_others(terminal):
    began_s = time.monotonic()
    table = terminal.table()
    for n in range(1000):
        table.show(report(*(device(f"gpu-{i}") for i in range(n % 3)), node=f"n{n}"))
    seen = terminal.read_until("n999  no devices")
    table.close()
    assert seen.count(HOME) <= 1 + (time.monotonic() - began_s) / MIN_PERIOD_S


def test_stopped_terminal_blocks_neither_reports_nor_close(terminal):
    # The master is not read: its buffer fills, and the drawing thread hangs in write(2).
    table = terminal.table(TextStyle(colour=True))
    large = report(*(device(f"gpu-{i}", SHRUNK) for i in range(2000)))
    for _ in range(1000):
        table.show(large)
    assert not table.close()
    terminal.read_until(LEAVE)  # once the terminal goes on, so does the thread
    terminal.read_until("gpu-1999")


def test_closed_terminal_ends_only_the_drawing(monkeypatch):
    terminal = Terminal()
    table = terminal.table()
    terminal.read_until("no report yet")
    monkeypatch.setattr("agent.cli.output.log.CLOSE_TIMEOUT_S", PATIENCE_S)
    os.close(terminal.master)
    table.show(BUSY)
    assert table.close()
    terminal.stream.close()


def test_frame_fits_the_height_and_counts_hidden_lines():
    text = "\n".join(f"line {n}" for n in range(50))
    drawn = screen_update(text, 20)
    assert drawn.count("\n") == 18
    assert drawn.endswith("  … 32 more lines; arrow keys scroll, q quits\x1b[K" + BELOW)
    assert "line 49" in screen_update(text, 51)
    assert "line 49" in screen_update(text, None)


def test_frame_begins_with_the_first_line_and_ends_with_the_last():
    text = "\n".join(f"line {n}" for n in range(50))
    drawn = screen_update(text, 20, first=5)
    assert drawn.startswith(f"{HOME}line 5\x1b")
    assert "… 27 more lines" in drawn
    assert screen_update(text, 20, first=99).startswith(f"{HOME}line 32\x1b")
    assert "line 0\x1b" in screen_update(text, None, first=5)


def test_keys_scroll_the_table_and_the_terminals_mode_returns():
    # a session of its own, whose terminal has it in the foreground
    program = """if True:
        import os, sys, threading, time
        from agent.cli.output import log
        from agent.cli.output.live_table import LiveTable
        from agent.cli.output.terminal import TextStyle
        log.CLOSE_TIMEOUT_S = 60.0
        begun = threading.Event()  # no key comes before the handler of Ctrl-C
        head = lambda _: begun.wait() and "".join(f"line {n}\\n" for n in range(50))
        style = TextStyle(width=80, height=10)
        table = LiveTable(sys.stdout, lambda: style, head=head, keyboard=0)
        try:
            begun.set()
            while True:
                time.sleep(0.1)
        except KeyboardInterrupt:
            table.close()
            os.write(1, b"ended by a key")
    """
    pid, master = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", program])
    terminal = Terminal.__new__(Terminal)
    terminal.master, terminal.seen = master, ""
    try:
        terminal.read_until("more lines")
        for key, line in ((b"\x1b[B", "line 1"), (b"\x1b[6~", "line 11"), (b"\x1b[A", "line 10")):
            os.write(master, key)
            terminal.read_until(f"{HOME}{line}\x1b")
        os.write(master, b"q")
        terminal.read_until("ended by a key")
        line_mode = termios.ICANON | termios.ECHO
        assert termios.tcgetattr(master)[3] & line_mode == line_mode
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(master)


def test_stop_by_ctrl_z_restores_the_terminal_until_it_continues():
    # A shell with job control, in a session of its own: the table is its job in the foreground.
    shell = """if True:
        import os, signal, sys, termios, threading, time
        begun = threading.Event()  # no key comes before the handler of Ctrl-Z
        job = os.fork()
        if not job:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            os.tcsetpgrp(0, os.getpid())
            signal.signal(signal.SIGTTOU, signal.SIG_DFL)
            from agent.cli.output.live_table import live_table
            table = live_table("never", head=lambda _: begun.wait() and "HEAD\\n")
            begun.set()
            while True:
                time.sleep(0.1)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        for text in (b"stopped once", b"stopped twice"):
            _, status = os.waitpid(job, os.WUNTRACED)
            assert os.WIFSTOPPED(status), status
            lines = termios.ICANON | termios.ECHO
            os.tcsetpgrp(0, os.getpgrp())
            os.write(1, text + (b", by lines" if termios.tcgetattr(0)[3] & lines == lines else b", raw"))
            os.tcsetpgrp(0, job)
            os.kill(job, signal.SIGCONT)
        os.waitpid(job, 0)
    """
    pid, master = pty.fork()
    if not pid:
        os.execve(sys.executable, [sys.executable, "-c", shell], os.environ | {"TERM": "xterm"})
    terminal = Terminal.__new__(Terminal)
    terminal.master, terminal.seen = master, ""
    try:
        terminal.read_until("no report yet")
        for text in ("stopped once", "stopped twice"):
            os.write(master, b"\x1a")
            assert LEAVE in terminal.read_until(text)
            terminal.read_until("by lines")
            assert terminal.read_until("no report yet").startswith(f"{ENTER}{HOME}HEAD")
            status = Path(f"/proc/{os.tcgetpgrp(master)}/status")
            while not caught_signals(status) & 1 << (signal.SIGTSTP - 1):  # the handler comes after the table
                time.sleep(0.01)
    finally:
        if group := os.tcgetpgrp(master):  # 0: the shell has ended, and killpg(0) would end the tests
            os.killpg(group, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(master)


def caught_signals(status: Path) -> int:
    """Return the bit set of signals that a process handles, from its file in procfs."""
    return int(status.read_text().partition("SigCgt:")[2].split()[0], 16)


def test_log_stays_in_a_window_too_small_for_the_table():
    drawn = screen_update(
        "\n".join(f"line {n}" for n in range(50)), 20, ["", "  warning: one", "  warning: two"]
    )
    assert drawn.count("\n") == 18
    assert "… 35 more lines" in drawn
    assert drawn.endswith("  warning: one\x1b[K\r\n  warning: two\x1b[K" + BELOW)
    assert len(screen_update("table", 4, [f"warning {n}" for n in range(9)]).splitlines()) < 4


def test_worst_devices_come_first_in_a_small_window(terminal):
    healthy = [device(f"gpu-{n}") for n in range(40)]
    table = terminal.table()
    table.show(report(*healthy, device("gpu-40", THROTTLED), device("gpu-41", SHRUNK)))
    seen = terminal.read_until("more lines")
    assert seen.index("gpu-41") < seen.index("gpu-40") < seen.index("gpu-0")
    table.show(report(*healthy[:3], device("gpu-40", THROTTLED), device("gpu-41", SHRUNK)))
    terminal.read_until("5 devices")
    seen = terminal.read_until(BELOW)
    assert seen.index("gpu-0") < seen.index("gpu-40") < seen.index("gpu-41")
    table.close()


def test_only_a_capable_terminal_is_redrawn(terminal, tmp_path):
    assert can_redraw(terminal.stream, {"TERM": "xterm"})
    assert not can_redraw(terminal.stream, {"TERM": "dumb"})
    assert not can_redraw(terminal.stream, {})
    with (tmp_path / "file").open("w") as file:
        assert not can_redraw(file, {"TERM": "xterm"})


def test_style_follows_the_window_size(terminal):
    style = style_of(terminal.stream, "auto", {"TERM": "xterm"})
    assert (style.width, style.height, style.colour) == (100, 20, True)
    fcntl.ioctl(terminal.stream, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    assert style_of(terminal.stream, "auto", {}).width == 80

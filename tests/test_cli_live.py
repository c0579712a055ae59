"""The live table, on a real pseudo-terminal: newest wins, and a stopped terminal holds nobody up."""

import fcntl
import os
import pty
import struct
import termios
import time
from collections.abc import Iterator

import pytest
from cli_reports import BUSY, SHRUNK, THROTTLED, device, report

from agent.cli.output.live import BELOW, ENTER, HOME, LEAVE, SOONEST_S, LiveTable, draw
from agent.cli.output.terminal import Style, can_redraw, style_of


class Terminal:
    """Both ends of a pseudo-terminal of 100 columns and 20 lines."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
        self.stream = os.fdopen(slave, "w")
        self.seen = ""

    def read_until(self, text: str) -> str:
        """What was written until ``text`` came; the test's own limit is the timeout."""
        while text not in self.seen:
            self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def table(self, style: Style | None = None) -> LiveTable:
        """A live table on it, in the style given or its own."""
        return LiveTable(
            self.stream, lambda: style or style_of(self.stream, "never", {}), head=lambda _: "HEAD\n"
        )


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    os.close(terminal.master)
    terminal.stream.close()


def test_a_table_is_drawn_redrawn_and_left_behind(terminal):
    table = terminal.table()
    assert terminal.read_until("no report yet").startswith(f"{ENTER}{HOME}HEAD")
    table.show(report(device("cpu-node0")))
    assert "1 device: 1 healthy" in terminal.read_until(BELOW + HOME) + terminal.read_until(BELOW)
    table.show(report(device("cpu-node0", SHRUNK)))
    terminal.read_until("1 device: 1 unhealthy")
    table.log.append("warning: something")
    table.close()
    terminal.read_until(LEAVE)
    assert "worker-7  1 device: 1 unhealthy" in terminal.read_until("warning: something")


def test_a_burst_of_reports_shows_the_newest_and_few_others(terminal):
    began_s = time.monotonic()
    table = terminal.table()
    for n in range(1000):
        table.show(report(*(device(f"gpu-{i}") for i in range(n % 3)), node=f"n{n}"))
    seen = terminal.read_until("n999  no devices")
    table.close()
    assert seen.count(HOME) <= 1 + (time.monotonic() - began_s) / SOONEST_S


def test_a_terminal_that_is_stopped_holds_up_neither_reports_nor_the_end(terminal):
    # Nobody reads the master: its buffer fills, and the drawing thread hangs in write(2).
    table = terminal.table(Style(colour=True))
    large = report(*(device(f"gpu-{i}", SHRUNK) for i in range(2000)))
    for _ in range(1000):
        table.show(large)
    assert not table.close()
    terminal.read_until(LEAVE)  # once the terminal goes on, so does the thread
    terminal.read_until("gpu-1999")


def test_a_terminal_that_goes_away_ends_the_drawing_only():
    terminal = Terminal()
    table = terminal.table()
    terminal.read_until("no report yet")
    os.close(terminal.master)
    table.show(BUSY)
    assert table.close()
    terminal.stream.close()


def test_a_picture_fits_the_height_and_says_what_is_hidden():
    text = "\n".join(f"line {n}" for n in range(50))
    drawn = draw(text, 20)
    assert drawn.count("\n") == 18
    assert drawn.endswith("  … 32 more lines; enlarge the window\x1b[K" + BELOW)
    assert "line 49" in draw(text, 51)
    assert "line 49" in draw(text, None)


def test_the_log_stays_in_a_window_that_is_too_low_for_the_table():
    drawn = draw("\n".join(f"line {n}" for n in range(50)), 20, ["", "  warning: one", "  warning: two"])
    assert drawn.count("\n") == 18
    assert "… 35 more lines" in drawn
    assert drawn.endswith("  warning: one\x1b[K\r\n  warning: two\x1b[K" + BELOW)
    assert len(draw("table", 4, [f"warning {n}" for n in range(9)]).splitlines()) < 4


def test_what_is_not_well_comes_first_where_not_all_can_be_seen(terminal):
    healthy = [device(f"gpu-{n}") for n in range(40)]
    table = terminal.table()
    table.show(report(*healthy, device("gpu-40", THROTTLED), device("gpu-41", SHRUNK)))
    seen = terminal.read_until("enlarge the window")
    assert seen.index("gpu-41") < seen.index("gpu-40") < seen.index("gpu-0")
    table.show(report(*healthy[:3], device("gpu-40", THROTTLED), device("gpu-41", SHRUNK)))
    terminal.read_until("5 devices")
    seen = terminal.read_until(BELOW)
    assert seen.index("gpu-0") < seen.index("gpu-40") < seen.index("gpu-41")
    table.close()


def test_only_a_terminal_that_can_move_its_cursor_is_redrawn(terminal, tmp_path):
    assert can_redraw(terminal.stream, {"TERM": "xterm"})
    assert not can_redraw(terminal.stream, {"TERM": "dumb"})
    assert not can_redraw(terminal.stream, {})
    with (tmp_path / "file").open("w") as file:
        assert not can_redraw(file, {"TERM": "xterm"})


def test_the_style_follows_the_window(terminal):
    style = style_of(terminal.stream, "auto", {"TERM": "xterm"})
    assert (style.width, style.height, style.colour) == (100, 20, True)
    fcntl.ioctl(terminal.stream, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    assert style_of(terminal.stream, "auto", {}).width == 80

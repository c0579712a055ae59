"""The kernel log's thread: on the real /dev/kmsg if it is writable, on FIFOs and on files of records.

All processes share the real log: each test writes lines with a unique marker, and tests that wipe the log or
change its write permission hold the machine's lock.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from core_threads import ThreadReader
from hypothesis import given
from hypothesis import strategies as st
from log_lines import match_pattern
from machine import machine_lock, skip_unless_kernel_log
from other_user import skip_unless_user_can_change
from own_process import resident, run_in_own_process
from patience import PATIENCE_S
from wire.serving import descriptors, eventually

from agent.health.gpu.xid.log_lines import GPU_LOG_PATTERNS
from agent.health.host.machine.rules import LOG_RULES
from agent.health.kernel_log.facts import compile_pattern
from agent.model.machine_samples import LogSample
from agent.model.reading import SourceState
from agent.native.kernel_events import KernelLogReader

DEVICE = Path("/dev/kmsg")
RATE_LIMIT = Path("/proc/sys/kernel/printk_devkmsg")
XID = "NVRM: Xid (PCI:%b): %d, %*"


class Reader(ThreadReader[LogSample]):
    """Started reader with an eventfd."""

    def __init__(self, path: Path, *patterns: str, any_facility: bool = False) -> None:
        super().__init__()
        self.thread = KernelLogReader(path, patterns, self.fd, any_facility)
        self.thread.start()


@contextmanager
def reader(path: Path, *patterns: str, any_facility: bool = False) -> Iterator[Reader]:
    """Yield a reader, and stop it afterwards."""
    kmsg_reader = Reader(path, *patterns, any_facility=any_facility)
    try:
        yield kmsg_reader
    finally:
        assert kmsg_reader.thread.stop(PATIENCE_S)
        os.close(kmsg_reader.fd)


def times(sample: LogSample) -> list[int]:
    return [line.times for line in sample.lines]


def newest(sample: LogSample) -> int:
    return max((line.seq for line in sample.lines), default=-1)


# --- a file of records --------------------------------------------------------------------------------------


def record(seq: int, text: str, *, priority: int = 4) -> str:
    return f"{priority},{seq},{seq * 10},-;{text}\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text("")
    return path


def add(log: Path, *records: str) -> None:
    with log.open("a") as f:
        f.write("".join(records))


def test_lines_are_counted_by_their_key(log: Path) -> None:
    add(
        log,
        record(0, "Linux version 6.18"),
        record(1, "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=a, Ch 8"),
        record(2, "NVRM: Xid (PCI:0000:86:00): 48, pid=7, name=a, DBE"),
        record(3, "NVRM: Xid (PCI:0000:3b:00): 31, pid=9, name=b, Ch 8"),
    )
    with reader(log, "usb %*", XID) as kmsg_reader:
        sample = kmsg_reader.until(lambda s: s.source.state is SourceState.OK)
        first, second = sample.lines
        assert (first.pattern, first.times, first.first_us, first.last_us, first.seq) == (1, 2, 10, 30, 3)
        assert first.first_text.endswith("pid=7, name=a, Ch 8")
        assert first.text.endswith("pid=9, name=b, Ch 8")
        assert (second.times, second.first_text) == (1, second.text)
        assert (sample.lost, sample.source.failures, sample.source.detail) == (0, 0, "")
        assert sample.is_complete


def test_unchanged_line_is_not_decoded_again(log: Path) -> None:
    add(log, record(0, "lost a"), record(1, "lost b"))
    with reader(log, "lost %w") as kmsg_reader:
        before = kmsg_reader.until(lambda s: times(s) == [1, 1])
        add(log, record(2, "lost b"))
        after = kmsg_reader.until(lambda s: times(s) == [1, 2])
        assert after.lines[0] is before.lines[0]


def test_lost_records_are_counted_and_a_late_start_loses_none(log: Path) -> None:
    add(log, record(100, "lost a"), record(105, "lost a"))
    with reader(log, "lost %w") as kmsg_reader:
        sample = kmsg_reader.until(lambda s: times(s) == [2])
        assert (sample.lost, sample.source.state) == (4, SourceState.OK)
        assert sample.source.detail == "4 records were overwritten before they were read"


@pytest.mark.parametrize(("numbers", "is_complete"), [((0, 1), True), ((1, 2), False), ((0, 2), False)])
def test_log_is_complete_if_every_record_since_boot_was_read(
    log: Path, numbers: tuple[int, ...], is_complete: bool
) -> None:
    add(log, *(record(number, "lost a") for number in numbers))
    with reader(log, "lost %w") as kmsg_reader:
        assert kmsg_reader.until(lambda s: times(s) == [2]).is_complete is is_complete


def test_lost_records_text_is_correct(log: Path) -> None:
    (rule,) = LOG_RULES
    (written,) = re.findall(r"printf '(.*)' > ", rule.try_it)
    log.write_text(written.replace(r"\n", "\n"))
    with reader(log, "two%*") as kmsg_reader:
        assert kmsg_reader.until(lambda s: times(s) == [1]).lost == 7


def test_log_that_appears_later_is_found(tmp_path: Path) -> None:
    path = tmp_path / "late"
    with reader(path, "lost %w") as kmsg_reader:
        absent = kmsg_reader.until(lambda s: s.source.state is SourceState.ABSENT).source
        assert absent.detail == f"{path}: No such file or directory"
        assert absent.failures == 0
        whole = tmp_path / "whole"
        whole.write_text(record(0, "lost a"))
        whole.rename(path)
        found = kmsg_reader.until(lambda s: s.source.state is SourceState.OK)
        assert times(found) == [1]
        assert found.source.detail == ""


def test_file_that_is_no_log_is_reported(log: Path) -> None:
    add(log, "[    0.000000] Linux version 6.18\n")
    with reader(log, "lost %w") as kmsg_reader:
        failing = kmsg_reader.until(lambda s: s.source.state is SourceState.FAILING).source
        assert failing.detail == f"{log}: text cannot be parsed"


AS_OTHER_USER = """
import os, select, sys
from pathlib import Path
from agent.native.kernel_events import KernelLogReader
os.setgroups([]); os.setgid(65534); os.setuid(65534)
fd = os.eventfd(0)
kmsg = KernelLogReader(Path(sys.argv[1]), ["%*"], fd, True)  # also after a test that wiped the kernel's lines
kmsg.start()
select.select([fd], [], [], 60)
sample = kmsg.read()
print(sample.source.state, len(sample.lines), sample.source.failures, sample.source.detail)
assert kmsg.stop(60)
"""


def read_as_other_user(path: Path, stdin: int = subprocess.DEVNULL) -> str:
    skip_unless_user_can_change()
    done = subprocess.run(
        [sys.executable, "-c", AS_OTHER_USER, str(path)],
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout.strip()


def test_log_without_permission_fails() -> None:
    with tempfile.NamedTemporaryFile(dir="/tmp") as secret:  # other users may not enter pytest's directories
        assert read_as_other_user(Path(secret.name)) == f"failing 0 1 {secret.name}: Permission denied"


def test_real_log_needs_a_permission() -> None:
    restricted = Path("/proc/sys/kernel/dmesg_restrict")
    skip_unless_kernel_log(os.O_RDONLY)
    if not restricted.exists() or restricted.read_text() != "1\n":
        pytest.skip("every user may read the kernel log here")
    assert read_as_other_user(DEVICE) == "failing 0 1 /dev/kmsg: Operation not permitted"


@pytest.fixture
def open_log() -> Iterator[int]:
    """Yield the kernel log as a service manager opens it for the agent."""
    skip_unless_kernel_log(os.O_RDONLY)
    fd = os.open(DEVICE, os.O_RDONLY | os.O_CLOEXEC)
    yield fd
    os.close(fd)


def test_real_log_as_standard_input_is_read_from_its_beginning(open_log: int) -> None:
    """The open file of standard input is read, as it has become non-blocking, so no permission is needed."""
    for _ in range(2):
        state, entries, *_ = read_as_other_user(DEVICE, open_log).split()
        assert (state, entries != "0") == ("ok", True)
        assert not os.get_blocking(open_log)


def test_standard_input_is_ignored_for_another_path(open_log: int) -> None:
    with tempfile.NamedTemporaryFile(
        "w", dir="/tmp"
    ) as file:  # other users may not enter pytest's directories
        os.fchmod(file.fileno(), 0o644)
        file.write(record(0, "lost a"))
        file.flush()
        assert read_as_other_user(Path(file.name), open_log) == "ok 1 0"
        assert os.get_blocking(open_log)


# --- a FIFO of records --------------------------------------------------------------------------------------


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(("kinds", "entries"), [(1, 1), (100_000, 512)])
def test_flood_of_lines_takes_no_memory(fifo: Path, kinds: int, entries: int) -> None:
    run_in_own_process(flood_of_kinds, fifo, kinds, entries)


def flood_of_kinds(path: str, of: str, left: str) -> None:
    flood, kinds, entries = 100_000, int(of), int(left)
    with reader(Path(path), "lost %w") as kmsg_reader:
        with Path(path).open("w") as f:
            f.write("".join(record(i, f"lost w{i % kinds}") for i in range(1000)))
            f.flush()
            kmsg_reader.until(lambda s: newest(s) >= 999)
            before = resident()
            for start in range(1000, flood, 1000):
                f.write("".join(record(i, f"lost w{i % kinds}") for i in range(start, start + 1000)))
        sample = kmsg_reader.until(lambda s: newest(s) == flood - 1)
        assert len(sample.lines) == entries
        evicted = kinds - entries
        assert sample.source.detail == (
            f"{evicted} kinds of lines were dropped for lack of room" if evicted else ""
        )
        assert sum(times(sample)) == flood - evicted
        assert sample.lost == 0
        assert resident() - before < 2 << 20


def test_reader_stops_during_a_flood(fifo: Path) -> None:
    lines = "".join(record(i, "lost a") for i in range(1000))
    over = threading.Event()

    def flood() -> None:
        fd = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # always has a reader
        while not over.is_set():
            try:
                os.write(fd, lines.encode())
            except BlockingIOError:
                select.select([], [fd], [], 0.1)
        os.close(fd)

    kmsg_reader = Reader(fifo, "lost %w")
    thread = threading.Thread(target=flood)
    thread.start()
    try:
        kmsg_reader.until(lambda s: s.source.passes > 3 and bool(s.lines))
        assert kmsg_reader.thread.stop(PATIENCE_S)
    finally:
        over.set()
        thread.join()
        os.close(kmsg_reader.fd)


def test_user_space_messages_are_ignored(fifo: Path) -> None:
    with reader(fifo, "lost %w") as kmsg_reader, fifo.open("w") as f:
        f.write(record(0, "lost user", priority=8 + 3) + record(1, "lost kernel", priority=3))
        f.flush()
        sample = kmsg_reader.until(lambda s: bool(s.lines))
        assert [line.text for line in sample.lines] == ["lost kernel"]


# --- the real log -------------------------------------------------------------------------------------------


def write(text: str) -> int:
    """Write a record below the console's level, through a new descriptor: writes are rate-limited.

    Return its sequence number in the log.
    """
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.lseek(fd, 0, os.SEEK_END)
        os.write(fd, f"<15>{text}\n".encode())
        while True:  # past records of other processes
            head, _, line = os.read(fd, 8192).decode(errors="replace").partition(";")
            if text[:20] in line:
                return int(head.split(",")[1])
    finally:
        os.close(fd)


@pytest.fixture
def nonce() -> Iterator[str]:
    """Yield a unique marker for lines of this test, which no other run of the tests overwrites meanwhile."""
    skip_unless_kernel_log(os.O_RDWR)
    with machine_lock():
        yield f"drahealth-{os.getpid()}-{time.monotonic_ns()}"


def test_record_of_the_real_log_arrives(nonce: str) -> None:
    write(f"{nonce} before: 1")
    with reader(DEVICE, f"{nonce} %w %d", any_facility=True) as kmsg_reader:
        assert times(kmsg_reader.until(lambda s: bool(s.lines))) == [
            1
        ]  # written before the reader opened the log
        for number in (2, 2, 3):
            write(f"{nonce} after: {number}, with\ttab and \\")
        sample = kmsg_reader.until(lambda s: sum(times(s)) == 4)
        assert times(sample) == [1, 2, 1]
        assert sample.lines[2].text == rf"{nonce} after: 3, with\x09tab and \x5c"
        assert sample.lines[1].first_us <= sample.lines[1].last_us <= sample.lines[2].first_us


def test_user_space_record_of_the_real_log_is_ignored(nonce: str) -> None:
    with reader(DEVICE, f"{nonce} %*") as kernel, reader(DEVICE, f"{nonce} %*", any_facility=True) as anyone:
        kernel.until(lambda s: s.source.state is SourceState.OK)
        write(f"{nonce} Xid 79")
        anyone.until(lambda s: bool(s.lines))
        passes = kernel.read().source.passes
        deadline = time.monotonic() + PATIENCE_S
        while kernel.read().source.passes < passes + 2:  # each record causes a pass
            assert time.monotonic() < deadline
            write(f"{nonce} Xid 79")
        assert kernel.read().lines == ()


OVERRUN = """
import json, os, select, sys
from pathlib import Path
from agent.native.kernel_events import KernelLogReader
fd = os.eventfd(0)
kmsg = KernelLogReader(Path("/dev/kmsg"), [sys.argv[1] + " %w"], fd, True)
kmsg.start()
for wanted in ("first", "last"):
    texts = []
    while not any(text.endswith(wanted) for text in texts):
        if not select.select([fd], [], [], 60)[0]:
            sys.exit(f"no line with {wanted!r}")
        os.eventfd_read(fd)
        sample = kmsg.read()
        texts = [line.text for line in sample.lines]
    print(json.dumps([sample.lost, sample.source.state, sample.source.failures]), flush=True)
assert kmsg.stop(60)
"""


RECORDS = 6000  # of 900 bytes, 5 MiB in all; the largest log of a distribution's kernel is 1 MiB


@contextmanager
def unlimited_rate() -> Iterator[None]:
    """Lift the rate limit of user space writes to the log for the duration of the context."""
    with machine_lock():
        before = RATE_LIMIT.read_text()
        try:
            RATE_LIMIT.write_text("on\n")
        except OSError as error:
            pytest.skip(f"may not write {RATE_LIMIT}: {error.strerror}")
        try:
            yield
        finally:
            RATE_LIMIT.write_text(before)


@contextmanager
def overrun_child(nonce: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that reads the log, and reports the first line and the last."""
    with subprocess.Popen([sys.executable, "-c", OVERRUN, nonce], stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def test_overwritten_records_are_counted_and_reading_continues(nonce: str) -> None:
    """A signal stops the reader while the log is overwritten more than once."""
    first = write(f"{nonce} first")
    with unlimited_rate(), overrun_child(nonce) as child:
        assert child.stdout is not None
        before, *state = json.loads(child.stdout.readline())  # a full log loses a record for each new one
        assert state == ["ok", 0]
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        fd = os.open(DEVICE, os.O_WRONLY | os.O_CLOEXEC)
        for _ in range(RECORDS):
            os.write(fd, b"<15>" + b"x" * 900 + b"\n")
        os.close(fd)
        last = write(f"{nonce} last")
        child.send_signal(signal.SIGCONT)
        lost, state, failures = json.loads(child.stdout.readline())
        assert 1000 < lost - before < last - first  # other processes write to the log, too
        assert (state, failures) == ("ok", 0)
        assert child.wait(PATIENCE_S) == 0


# --- the thread ---------------------------------------------------------------------------------------------


def test_nothing_is_read_before_start_or_left_after_stop(log: Path) -> None:
    before = descriptors()
    fd = os.eventfd(0)
    kmsg = KernelLogReader(log, ["lost %w"], fd, False)
    assert kmsg.read() is None
    begun_ns = time.monotonic_ns()
    kmsg.start()
    starting = kmsg.read()
    assert starting is not None
    assert starting.source.name == "kmsg"
    assert begun_ns <= starting.source.beat_ns <= time.monotonic_ns()
    assert kmsg.stop(PATIENCE_S)
    assert kmsg.stop(PATIENCE_S)  # a second stop has nothing to do
    os.close(fd)
    eventually(lambda: descriptors() <= before, "no descriptor is left; other threads open some for a while")


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("Xid %q", "kernel log pattern 'Xid %q': syntax error at character 4"),
        ("%*%d", "kernel log pattern '%*%d': syntax error at character 2"),
        ("", "kernel log pattern '': syntax error at character 0"),
        (
            "Grüße %d",
            "kernel log pattern 'Grüße %d': has a zero byte or a character that is not ASCII; the kernel log "
            "has neither",
        ),
        (
            "a\0b",
            "kernel log pattern 'a\\x00b': has a zero byte or a character that is not ASCII; the kernel log "
            "has neither",
        ),
    ],
)
def test_invalid_pattern_is_refused_by_name(log: Path, pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
        KernelLogReader(log, [XID, pattern], 0, False)


def test_too_many_patterns_are_refused(log: Path) -> None:
    with pytest.raises(ValueError, match="161 kernel log patterns, limit 160"):
        KernelLogReader(log, [XID] * 161, 0, False)


# --- the patterns -------------------------------------------------------------------------------------------

PIECES = [
    *("NVRM: ", "Xid (PCI:", "0000:3b:00", "0000:3b:00.0", " GPU-I:", "): ", "79", "154", ", ", "74, "),
    *("Link ", "link 4(", "0x1f", "(GPC ", "changed from ", ") to ", "x", " ", ",", "GPU at ", "GPU "),
    *("has fallen off the bus", "nvidia-nvswitch3: SXid (PCI:", "Fatal, ", "RmInitAdapter failed"),
]
TOKENS = ["%b", "%d", "%x", "%w", "a", ",", " ", "0x", ":"]


@given(st.sampled_from(GPU_LOG_PATTERNS), st.lists(st.sampled_from(PIECES), max_size=16).map("".join))
def test_c_and_python_extract_the_same_key(pattern: str, text: str) -> None:
    reference = compile_pattern(pattern).match(text)
    fields = pattern.split("%")[1:]
    expected = reference and tuple(g for g, f in zip(reference.groups(), fields, strict=True) if f[0] != "*")
    assert match_pattern(pattern, text) == expected


@given(
    st.lists(st.sampled_from(["%b", "%d", "%x", "%w", "a", ",", " ", "0x", ":"]), min_size=1, max_size=8),
    st.data(),
)
def test_c_and_python_agree_on_random_patterns(tokens: list[str], data: st.DataObject) -> None:
    examples = {"%b": "0000:3b:00.0", "%d": "42", "%x": "0x2a", "%w": "word"}
    line = "".join(data.draw(st.sampled_from([examples.get(t, t), t, "", "0"])) for t in tokens)
    reference = compile_pattern("".join(tokens)).match(line)
    assert match_pattern("".join(tokens), line) == (reference and reference.groups())

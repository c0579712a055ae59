"""NVML in a process of its own, so that a crash or leak of the vendor's library does not affect the agent.

A child process (:mod:`agent.node.nvml_process_main`) has the C core's GPU threads, the library and pynvml.
The threads publish their records in shared memory, which the agent maps read-only, and wake the agent through
its eventfd. A socket pair carries the options, and the requests for a count or an inventory of GPUs. The end
of its connection is the request to stop.

If the child ends, its GPUs are reported as unreadable, with the signal or exit code, until the next child has
read them. Latched faults (those that the agent keeps) stay, and the kernel log still reports new ones.
"""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from agent.errors import ProbeError
from agent.model.gpu import GpuAttributes, GpuSample, NvmlCosts, NvmlReturnCode, NvmlSample
from agent.model.reading import Absence, Missing, PassDurations, SourceSample, SourceState
from agent.model.time import NS
from agent.native.gpu_watch import GpuWatch, GpuWatchOptions, SharedMemoryGpuReader, create_gpu_memory
from agent.node.nvml_process_main import (
    COUNT,
    DESCRIPTORS,
    INVENTORY,
    MESSAGE_MAX,
    decode_inventory,
    encode_options,
)
from agent.sources.gpu_os_facts import NvidiaPciDevices, read_nvidia_devices
from agent.system.files import may_exist
from agent.system.output import get_logger
from agent.system.process_stat import describe_exit
from agent.system.threads.thread_start import DaemonThread

MEMORY_MAX: Final = 256 << 20
"""Limit of the child's private writable memory, thread stacks included [bytes]."""
BACKOFF_S: Final = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
"""Pauses before each restart after the child process has ended [s]; the last pause repeats."""
STABLE_S: Final = 600.0
"""Lifetime of a child process after which the pauses of BACKOFF_S begin again with the shortest [s]."""
FIRST_PASS_S: Final = 2.0
"""Longest wait from the first NVML call of a new child to its first pass over all GPUs, before its records
replace the last ones [s]."""
INVENTORY_S: Final = 30.0
"""Longest wait for the child's answer to a request for the inventory of GPUs [s]."""
INVENTORY_BUSY: Final = "GPU inventory: the NVML process has not answered an earlier request; NVML may hang"
DRIVER_CHECK_S: Final = 20.0
"""Interval of checks for a GPU driver while no child runs and no kernel event is received [s]. The PCI bus is
listed at start and after an event only: a GPU without a driver cannot be read."""
PERIOD_NS: Final = 10 * NS
"""Period of the source ``nvml`` while there is no child process: that of checks for the library [ns]."""
_COPY_FD_MIN: Final = 16  # above the numbers that the child's descriptors get
_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from agent.system.deferred_modules import defer_modules; defer_modules(); "
    "from agent.node.nvml_process_main import main; main()"
)
"""Python program of the child process: it imports the agent's files from the paths of its parent."""
_UNREADABLE: Final = Missing(Absence.UNREADABLE)

log = get_logger(__name__)


class _Child(NamedTuple):
    """Running child process that calls NVML: its PID, socket and the reader of its shared memory."""

    pid: int
    channel: socket.socket
    watch: SharedMemoryGpuReader


class NvmlProcess:
    """Child process that calls NVML, and the thread that starts this process again when it ends. Thread-safe.

    The methods are those of :class:`agent.native.gpu_watch.GpuWatch`.

    Args:
        options: Library, periods and wake conditions.
        procfs_root: Mount point of procfs; shows whether the GPU driver is loaded.
        wake_fd: Eventfd that is written to when a value that a rule evaluates has changed.

    Raises:
        ConfigError: An option is out of range, or a path too long.
        ProbeError: The kernel refused a descriptor or memory.
    """

    def __init__(self, options: GpuWatchOptions, procfs_root: Path, wake_fd: int) -> None:
        # checks the options: an error must be raised here, not in the child
        GpuWatch(options, wake_fd).stop(0)
        self._options = options
        self._procfs_root = procfs_root
        self._wake_fd = os.dup(wake_fd)
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._last: NvmlSample | None = None
        """Newest sample that readers get, of this child or an earlier one.

        A later child replaces it once the child's library is open.
        """
        self._end = ""
        """How the last child process ended, or why it is being ended; empty: none has ended."""
        self._ends = 0
        self._ended_ns = time.monotonic_ns()
        """Time of the last end of a child process, or at which the driver appeared or vanished [ns]."""
        self._has_driver = True
        self._is_bus_unread = False
        self._before: NvmlSample | None = None
        """Last sample of the child process before this one; None: this is the first."""
        self._raw: NvmlSample | None = None
        """Newest sample as this child process published it, without the counts of earlier child processes."""
        self._was_reloaded = False
        """Whether the driver was reloaded between the last child process that read GPUs and this one."""
        self._unread: NvmlSample | None = None
        """Last sample of an ended child process, which :meth:`read` has yet to return."""
        self._first_call_ns = 0
        """CLOCK_MONOTONIC at which this child process was first seen to call NVML [ns]; 0: not yet."""
        self._requests = threading.Lock()
        self._unanswered: _Child | None = None
        """Child process that has not answered a request for the inventory; its answer may still come."""
        self._stop = threading.Event()
        self._check_driver = threading.Event()
        self._thread = DaemonThread(self._run, "dh-nvml")

    def start(self) -> None:
        """Start the thread that keeps a child process for NVML running while there is a GPU driver.

        Does not wait for NVML.
        """
        self._thread.start()

    def read(self) -> NvmlSample:
        """Return the newest record of each GPU. Blocks up to 10 ms while the child is preempted in a
        write."""
        with self._lock:
            if self._unread is not None:  # the next read has the end of the process
                unread, self._unread = self._unread, None
                self._wake()
                return unread
            return self._read_newest()

    def _read_newest(self) -> NvmlSample:
        """Return the sample of :meth:`read`, under the lock."""
        found = self._read_child(self._child) if self._child else None
        if found is None or not self._replaces_last(found):
            return self._without_child()
        if self._before is not None and not found.gpus and found.nvml.state is not SourceState.OK:
            return self._without_gpus(found, self._before)
        if self._raw is None:  # the first sample of this child process
            self._was_reloaded = self._is_reloaded(found)
        if found is not self._raw or self._last is None:
            self._raw = found
            self._last = (
                _add_counts(found, self._before, reloads=int(self._was_reloaded)) if self._before else found
            )
        return self._last

    def _is_reloaded(self, found: NvmlSample) -> bool:
        """Return whether the driver was reloaded since the last child process: it has another version, or its
        kernel module was loaded again. ``found`` is the first sample of this child process."""
        before = self._before
        if before is None:
            return False
        pairs = ((before.module, found.module), (before.driver, found.driver))
        return any(last and now and last != now for last, now in pairs)

    def _replaces_last(self, found: NvmlSample) -> bool:
        """Return whether a new child process's first sample replaces the last sample of the child before.

        It does once the new child has read all GPUs that the child before had, or FIRST_PASS_S after the new
        child's first NVML call. NVML lists the GPUs one after another, so the first samples can lack some.
        The time before that call is not limited: on a busy machine a child takes seconds to start.
        """
        if self._before is None:
            return True
        now_ns = time.monotonic_ns()
        is_starting = found.nvml.state is SourceState.STARTING
        if not self._first_call_ns:
            if is_starting and not found.call_ns:
                return False
            self._first_call_ns = found.call_ns or now_ns
        read = {gpu.uuid for gpu in found.gpus if gpu.passes}
        is_read = not is_starting and read >= {gpu.uuid for gpu in (*found.gpus, *self._before.gpus)}
        return is_read or now_ns - self._first_call_ns > FIRST_PASS_S * NS

    def _read_child(self, child: _Child) -> NvmlSample | None:
        try:
            return child.watch.read()
        except (ValueError, LookupError) as error:
            self._end = f"has invalid shared memory: {error}"
            log.error("NVML process: %s; restarting the process", self._end)  # noqa: TRY400
            os.kill(child.pid, signal.SIGKILL)
            return None

    def _without_child(self) -> NvmlSample:
        if not self._has_driver:
            absent = _no_gpus(SourceState.ABSENT, self._ended_ns, "no NVIDIA driver, GPU or library")
            if (before := self._last) is None:
                return absent
            nvml = _continued_source(absent.nvml, before.nvml)
            return replace(absent, nvml=nvml, events=_continued_source(absent.events, before.events))
        if not self._end:
            return _no_gpus(SourceState.STARTING, self._ended_ns)
        reason = self._end_reason()
        if self._last is None:
            failing = _no_gpus(SourceState.FAILING, time.monotonic_ns(), reason)
            return replace(failing, err=NvmlReturnCode.UNKNOWN, process=reason)
        return _sample_without_child(self._last, reason)

    def _end_reason(self) -> str:
        times = f", {self._ends} times since the agent started" if self._ends > 1 else ""
        return f"the NVML process {self._end}{times}"

    def _without_gpus(self, found: NvmlSample, before: NvmlSample) -> NvmlSample:
        """Return the sample while a new child process lists no GPU, because NVML is being opened or cannot be
        used: the GPUs of the last child process, without readings."""
        now = _add_counts(found, before)
        last = _sample_without_child(before, self._end_reason())
        if found.nvml.state is not SourceState.STARTING:  # NVML's error is the better reason
            last = replace(last, err=found.err, process="")
        return replace(
            last,
            nvml=now.nvml,
            events=now.events,
            generation=now.generation,
            call=found.call,
            call_ns=found.call_ns,
        )

    def pass_durations(self) -> PassDurations | None:
        """Return how long the child process's readings of all GPUs took; None: no child process runs."""
        with self._lock:
            return self._child.watch.pass_durations() if self._child else None

    def costs(self) -> NvmlCosts | None:
        """Return the CPU time and durations of the child process's NVML calls; None: it does not run."""
        with self._lock:
            return self._child.watch.costs() if self._child else None

    def request_count(self) -> None:
        """Request a count of the GPUs, because the PCI bus changed. Never blocks."""
        with self._lock:
            if self._child is None:
                self._check_driver.set()
                return
            with contextlib.suppress(OSError):  # the process is busy: the next request counts the GPUs
                self._child.channel.send(COUNT, socket.MSG_DONTWAIT)

    def read_inventory(self) -> tuple[GpuAttributes, ...]:
        """Return the attributes of the GPUs, which the child reads with pynvml. Blocks up to 30 s.

        Raises:
            ProbeError: There is no child, it did not answer in time, or NVML failed.
        """
        with self._lock:
            child = self._child
            channel = child.channel.dup() if child else None
        if channel is None:
            raise ProbeError(
                f"GPU inventory: there is no NVML process{': it ' + self._end if self._end else ''}"
            )
        if not self._requests.acquire(blocking=False):
            channel.close()
            raise ProbeError(INVENTORY_BUSY)
        try:
            if self._unanswered is child:
                channel.recv(MESSAGE_MAX, socket.MSG_DONTWAIT)  # the late answer is out of date
            self._unanswered = child
            channel.settimeout(INVENTORY_S)
            channel.send(INVENTORY)
            answer = channel.recv(MESSAGE_MAX)
            self._unanswered = None
            return decode_inventory(answer)
        except BlockingIOError:
            raise ProbeError(INVENTORY_BUSY) from None
        except OSError as error:
            raise ProbeError(f"GPU inventory: the NVML process did not answer: {error}") from None
        finally:
            channel.close()
            self._requests.release()

    def request_stop(self) -> None:
        """Request the child process and its thread to end. :meth:`stop` waits for them. Never blocks."""
        self._stop.set()
        self._check_driver.set()
        with self._lock:
            child = self._child
            if child is not None:
                child.channel.shutdown(socket.SHUT_RDWR)

    def stop(self, timeout_s: float) -> bool:
        """End the child process and the thread that restarts it. Blocks up to `timeout_s` seconds.

        Returns False if the child hangs in the kernel.
        """
        self.request_stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_s * 0.7)
            with self._lock:
                if self._child is not None:
                    os.kill(self._child.pid, signal.SIGKILL)
            self._thread.join(timeout_s * 0.3)
        has_ended = not self._thread.is_alive()
        if has_ended and self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1
        return has_ended

    # --- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        attempt = 0
        is_bus_new = True
        while not self._stop.is_set():
            if not self._check_for_driver(is_bus_new):
                if is_requested := self._check_driver.wait(DRIVER_CHECK_S):
                    self._check_driver.clear()  # not always: a request right after the wait would be lost
                is_bus_new = is_requested or self._is_bus_unread
                continue
            is_bus_new = True
            started_ns = time.monotonic_ns()
            end = self._run_child()
            if self._stop.is_set():
                return
            attempt = 0 if time.monotonic_ns() - started_ns >= STABLE_S * NS else attempt
            pause_s = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
            attempt += 1
            log.error(
                "NVML process: %s; all GPUs are Unknown until it has started again, next start in %g s",
                end,
                pause_s,
            )
            self._wake()
            self._stop.wait(pause_s)

    def _check_for_driver(self, is_bus_new: bool) -> bool:
        """Return whether a GPU, its driver or the configured library file exists. A change wakes the agent.

        The PCI bus is listed only if it may have changed, since a large one has hundreds of functions.
        """
        library = self._options.library
        files = [self._procfs_root / "driver/nvidia/version", *([Path(library)] if "/" in library else ())]
        found = any(map(may_exist, files)) or (is_bus_new and self._has_gpu_on_bus())
        if found != self._has_driver:
            with self._lock:
                self._has_driver, self._ended_ns = found, time.monotonic_ns()
            self._wake()
        return found

    def _has_gpu_on_bus(self) -> bool:
        bus = read_nvidia_devices(self._options.sysfs_root)
        self._is_bus_unread = isinstance(bus, Missing) and bus.absence is Absence.UNREADABLE
        return isinstance(bus, NvidiaPciDevices) and bool(bus.gpus)

    def _run_child(self) -> str:
        """Run one child process to its end. Returns how it ended, such as ``was killed by SIGSEGV``."""
        try:
            child = self._start_child()
        except (OSError, MemoryError) as error:
            with self._lock:
                return self._set_end(f"could not be started: {str(error) or 'out of memory'}")
        with self._lock:
            self._child = child
            if self._stop.is_set():  # stop() found no child
                child.channel.shutdown(socket.SHUT_RDWR)
        self._wake()
        # The error: this program ignores SIGCHLD, or waits for all its children elsewhere
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            before = self._last
            newest = self._read_newest()  # NVML does not repeat events that the child stored since a read
            self._unread = self._last if self._last is not before else self._unread
            if self._last is not None:  # also the counts of a child that listed no GPU
                self._last = replace(self._last, nvml=newest.nvml)
            self._child = None
            end = self._set_end(_reap(child.pid))
            child.watch.close()
            child.channel.close()
        return end

    def _set_end(self, end: str) -> str:
        self._end, self._ended_ns = end, time.monotonic_ns()
        self._ends += 1
        if self._last is not None:
            nvml = self._last.nvml
            self._last = replace(self._last, nvml=nvml._replace(failures=nvml.failures + 1))
        self._before, self._raw, self._first_call_ns = self._last, None, 0
        return end

    def _start_child(self) -> _Child:
        if not sys.executable:
            raise FileNotFoundError(errno.ENOENT, "sys.executable is empty: no Python interpreter to start")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            memory_fd = create_gpu_memory()
            try:
                watch = SharedMemoryGpuReader(memory_fd, self._wake_fd)
                try:
                    ours.send(encode_options(self._options))
                    pid = _spawn((theirs.fileno(), memory_fd, self._wake_fd))
                except BaseException:
                    watch.close()
                    raise
            except BaseException:
                ours.close()
                raise
            finally:
                os.close(memory_fd)
        return _Child(pid, ours, watch)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)


def _spawn(sources: tuple[int, int, int]) -> int:
    """Start the child process, which gets the descriptors `sources` and standard error; return its PID."""
    paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    arguments = ["-I", "-S", "-c", _START, json.dumps(paths), str(os.getpid()), str(MEMORY_MAX)]
    copies: list[int] = []
    try:
        copies.extend(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _COPY_FD_MIN) for fd in sources)
        actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, 2, 1),
            *((os.POSIX_SPAWN_DUP2, copy, fd) for copy, fd in zip(copies, DESCRIPTORS, strict=True)),
        ]
        return os.posix_spawn(
            sys.executable, ["drahealth-nvml", *arguments], os.environ, file_actions=actions, setsigmask=()
        )
    finally:
        for copy in copies:
            os.close(copy)


def _reap(pid: int) -> str:
    """Collect the ended child process; return how it ended, such as ``was killed by SIGSEGV``."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return "ended; its exit code is not known"
    return describe_exit(status)


def _no_gpus(state: SourceState, since_ns: int, detail: str = "") -> NvmlSample:
    """Return a sample without GPUs, whose source ``nvml`` has the given state."""
    library = SourceSample("nvml", state, since_ns, PERIOD_NS, 0, detail, vital=False)
    return NvmlSample((), library, library._replace(name="nvml-events", state=SourceState.ABSENT, detail=""))


def _add_counts(found: NvmlSample, before: NvmlSample, reloads: int = 0) -> NvmlSample:
    """Return the sample of a new child process, with its counts raised by the previous child's counts.

    The start of a child is neither a reload of the driver nor the return of a lost GPU.

    Args:
        reloads: Number of reloads of the driver between the two child processes.
    """
    gpus = {gpu.uuid: gpu for gpu in before.gpus if gpu.uuid}
    reloads += max(0, found.generation - 1)
    return replace(
        found,
        gpus=tuple(_continued_gpu(gpu, gpus.get(gpu.uuid)) for gpu in found.gpus),
        nvml=_continued_source(found.nvml, before.nvml),
        events=_continued_source(found.events, before.events),
        generation=before.generation + reloads if before.generation else found.generation,
        module=found.module or before.module,
    )


def _continued_gpu(gpu: GpuSample, before: GpuSample | None) -> GpuSample:
    """Return a GPU's sample from a new child process, with its counts raised by the previous child's."""
    if before is None:
        return gpu
    return replace(
        gpu,
        passes=before.passes + gpu.passes,
        slow_passes=before.slow_passes + gpu.slow_passes,
        handles=before.handles - 1 + gpu.handles,
        changes=before.changes + gpu.changes,
        overdue=before.overdue + gpu.overdue,
        failures=before.failures + gpu.failures,
    )


def _continued_source(source: SourceSample, before: SourceSample) -> SourceSample:
    return source._replace(passes=before.passes + source.passes, failures=before.failures + source.failures)


def _sample_without_child(last: NvmlSample, reason: str) -> NvmlSample:
    """Return the sample to report while no child process runs: the last sample, without readings and events.

    Its sources do not stall, because their state (no child process) was verified now.
    """
    now_ns = time.monotonic_ns()
    gpus = tuple(
        replace(
            gpu,
            status=NvmlReturnCode.UNINITIALIZED,
            beat_ns=now_ns,
            call="",
            readings=dict.fromkeys(gpu.readings, _UNREADABLE),
            link_errors=(),
            events={},
            event_mask=0,
            xids=(),
        )
        for gpu in last.gpus
    )
    absent = last.events._replace(state=SourceState.ABSENT, detail="")
    failing = last.nvml._replace(state=SourceState.FAILING, beat_ns=now_ns, detail=reason)
    return replace(
        last,
        gpus=gpus,
        nvml=failing,
        events=absent,
        err=NvmlReturnCode.UNKNOWN,
        process=reason,
        call="",
    )

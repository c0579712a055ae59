"""``drahealth scan``: checks all devices of this machine once, without a running agent."""

from __future__ import annotations

import os
import pickle
import resource
import select
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

from agent.cli.output.json import API_VERSION, ObjectKeys, encode_each, process_documents, report_document
from agent.cli.output.report_text import render_report
from agent.cli.output.text import ListEntry, TextTable, clean, format_count, format_entries
from agent.cli.subcommand import (
    EXIT_OF_SEVERITY,
    EXIT_OF_SEVERITY_NPD,
    Subcommand,
    add_output,
    add_settings,
    exit_of_severities,
    load_config,
    print_result,
)
from agent.errors import ProbeError, UsageError
from agent.model.gpu import GpuField, GpuSample, NvmlSample
from agent.model.health import Severity
from agent.model.reading import Missing, Reading, SourceState, unlisted_sources
from agent.model.time import NS
from agent.system.process_stat import describe_exit
from agent.system.threads.thread_start import DaemonThread

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping

    from agent.cli.output.terminal import TextStyle
    from agent.config.config import Config
    from agent.model.health import DeviceHealth
    from agent.native.gpu_watch import GpuWatch
    from agent.sources.nvml_reference import FieldValue, ReferenceGpu

NAMES_MAX: Final = 8
"""Largest number of devices that the line for node-problem-detector names; it counts the others."""


def add_arguments(parser: ArgumentParser) -> None:
    add_output(parser)
    parser.add_argument(
        "--backend",
        choices=("native", "pynvml", "both"),
        default="native",
        help="native: the report; both: the report, and a comparison with what pynvml reads from each GPU; "
        "pynvml: only what pynvml reads, without verdicts (default: native)",
    )
    parser.add_argument(
        "--exit-style",
        choices=("nagios", "npd"),
        default="nagios",
        help="nagios: exit codes 0 to 3; npd: those of a custom plugin of node-problem-detector, and one "
        "line: 0 if no device is unhealthy, 1 if one is, 2 if one is unknown (default: nagios)",
    )
    add_settings(
        parser,
        "--node-name",
        "--sysfs-root",
        "--procfs-root",
        "--cgroupfs-root",
        "--kubelet-cgroup-root",
        "--nvml-library",
        "--kmsg",
        "--kmsg-any-facility",
    )


def main(args: Namespace) -> int:
    if args.backend == "pynvml" and args.exit_style == "npd":
        raise UsageError("--exit-style npd needs verdicts, and --backend pynvml has none; omit one of them")
    config = load_config(args)
    try:
        return _show_pynvml(config, args) if args.backend == "pynvml" else _show_report(config, args)
    except ProbeError as error:
        if args.exit_style == "npd":
            print(clean(str(error)))
        else:
            print(f"drahealth: {clean(str(error))}", file=sys.stderr)
        return _exit_codes(args)[Severity.UNKNOWN]


def _exit_codes(args: Namespace) -> Mapping[Severity, int]:
    return EXIT_OF_SEVERITY_NPD if args.exit_style == "npd" else EXIT_OF_SEVERITY


def _show_report(config: Config, args: Namespace) -> int:
    from agent.app.scan import scan_once
    from agent.sources.gpu_os_facts import read_node_processes

    check = read_in_child(lambda: cross_check(config)) if args.backend == "both" else None
    report = scan_once(config)
    unlisted = unlisted_sources(report.sources)
    processes = read_node_processes(config.procfs_root)

    def document() -> dict[str, Any]:
        backends = {"backends": crosscheck_document(check)} if check else {}
        return {**report_document(report), "processes": process_documents(processes), **backends}

    def text(style: TextStyle) -> str:
        if args.exit_style == "npd":
            line = npd_line(report.devices, unlisted, readers_differ=check is not None and check.differs)
            return f"{line}\n"
        comparison = "\n" + render_check(check, style) if check else ""
        return render_report(report, style, processes=processes) + comparison

    print_result(args, document, text)
    if unlisted and args.exit_style != "npd":
        print(f"drahealth: scan: {_missing_text(unlisted)}", file=sys.stderr)
    severities = [device.severity for device in report.devices]
    if check and check.differs:
        severities.append(Severity.UNKNOWN)  # one of the two is wrong; which one is not known
    return exit_of_severities(severities, _exit_codes(args), sources=report.sources)


def _missing_text(unlisted: Sequence[str]) -> str:
    """Return the text about sources that did not list their devices in time."""
    return f"no list of devices from {', '.join(unlisted)} in time; its devices may be missing"


def npd_line(
    devices: Sequence[DeviceHealth], unlisted: Sequence[str] = (), *, readers_differ: bool = False
) -> str:
    """Return one line about the devices, for the message of a condition of node-problem-detector.

    The line has no times and no readings, because node-problem-detector reports each change of the message.

    Args:
        devices: Devices of the report.
        unlisted: Names of the sources whose devices are missing.
        readers_differ: Whether pynvml and the C core read different values from a GPU.
    """
    if all(device.severity < Severity.UNKNOWN for device in devices):
        if unlisted:
            return f"unknown: {_missing_text(unlisted)}"
        if readers_differ:
            return "unknown: pynvml and the C core read different values from a GPU"
    if not devices:
        return "no device was found"
    for severity in (Severity.UNHEALTHY, Severity.UNKNOWN):
        in_state = [device for device in devices if device.severity is severity]
        if in_state:
            names = [clean(f"{device.device} ({device.causes[0].code})") for device in in_state[:NAMES_MAX]]
            more = f" and {len(in_state) - NAMES_MAX} more" if len(in_state) > NAMES_MAX else ""
            state = severity.name.lower()
            return f"{state}, {len(in_state)} of {len(devices)} devices: {', '.join(names)}{more}"
    return f"no device of {len(devices)} is unhealthy"


def _show_pynvml(config: Config, args: Namespace) -> int:
    gpus = read_in_child(lambda: read_pynvml(config))
    document = {"apiVersion": API_VERSION, "node": config.node_name, "gpus": gpu_documents(gpus)}
    print_result(args, lambda: document, lambda style: render_gpus(gpus, style))
    return 0


# --- comparison with pynvml ---------------------------------------------------------------------------------
#
# The C core reads each field before and after pynvml. A value of pynvml agrees
# if it lies between the two values of the C core. Otherwise the readers differ. If the value of a field
# changes all the time, both readers read the field once more. If a value has changed, the field has moved; if
# none has, the readers differ.
#
# Either reader may hang in the NVIDIA driver. If the C core hangs, pynvml is not called. If pynvml
# hangs, its thread is abandoned.

PERIOD_NS: Final = NS // 10
LIMIT_S: Final = 30.0
"""Time limit for one reading of all GPUs [s]: the driver takes seconds to initialize each unused GPU."""
STOP_S: Final = 0.5
MEMORY_MAX: Final = 512 << 20
"""Limit of the writable memory of the child process, in which a library may leak memory [bytes]."""

T = TypeVar("T")

CHANGING_FIELDS: Final = frozenset(
    {
        GpuField.TEMP,
        GpuField.MEM_TEMP,
        GpuField.MARGIN,
        GpuField.CLOCK_REASONS,
        GpuField.UTILIZATION,
        GpuField.PSTATE,
        GpuField.PCIE_GEN,
        GpuField.SLOWED_SW_POWER,
        GpuField.SLOWED_SW_THERMAL,
        GpuField.SLOWED_HW_THERMAL,
        GpuField.SLOWED_HW_BRAKE,
    }
)
"""Fields that change between two readings of a healthy GPU, even the PCIe speed: idle links are slower."""


class FieldAgreement(StrEnum):
    """Result of comparing one field's value from pynvml with those from the C core."""

    AGREES = "agrees"
    UNREAD = "unread"
    """Neither the C core nor pynvml could read the field."""
    MOVED = "moved"
    """The values of C core and pynvml differ, but the field changed while they were read."""
    DIFFERS = "differs"
    """The values of C core and pynvml contradict each other: one of them is wrong."""


class FieldComparison(NamedTuple):
    """Values of one GPU field from the C core and pynvml, and whether they agree."""

    gpu: str
    """UUID of the GPU, or ``GPU <index>`` if it reports none."""
    field: GpuField
    before: Reading
    pynvml: FieldValue
    after: Reading
    agreement: FieldAgreement

    @property
    def native_values(self) -> tuple[Reading, Reading]:
        return self.before, self.after

    @property
    def values(self) -> str:
        native = str(self.before) if self.before == self.after else f"{self.before}, then {self.after}"
        return f"native {native}, pynvml {self.pynvml}"


class GpuReaderComparison(NamedTuple):
    """Result of comparing what the C core and pynvml read from all GPUs."""

    comparisons: tuple[FieldComparison, ...] = ()
    problems: tuple[str, ...] = ()
    """Contradictions about other things than fields: whether NVML can be used, and which GPUs exist."""
    not_compared_reason: str = ""
    """Reason why no field was compared, although the readers do not contradict each other; else empty."""

    @property
    def differs(self) -> bool:
        """True: C core and pynvml contradict each other about a field, the GPUs or NVML."""
        return bool(self.problems) or any(
            comparison.agreement is FieldAgreement.DIFFERS for comparison in self.comparisons
        )


def compare_gpus(
    before: NvmlSample, pynvml: Sequence[ReferenceGpu] | str, after: NvmlSample
) -> GpuReaderComparison:
    """Compare what the C core read `before` and `after` pynvml with what pynvml read.

    `pynvml` is the error text if it could read nothing.
    """
    if isinstance(pynvml, str):
        if after.nvml.state is SourceState.OK:
            return GpuReaderComparison(problems=(f"only the C core can use NVML; pynvml: {pynvml}",))
        return GpuReaderComparison(not_compared_reason=f"neither can use NVML: {pynvml}")
    if after.nvml.state is not SourceState.OK:
        why = after.nvml.detail or after.nvml.state
        return GpuReaderComparison(problems=(f"only pynvml can use NVML; C core: {why}",))
    unmatched = {sample.index: sample for sample in after.gpus}
    earlier = {sample.index: sample for sample in before.gpus}
    comparisons: list[FieldComparison] = []
    problems: list[str] = []
    for index, gpu in enumerate(pynvml):
        name = gpu.uuid or f"GPU {index}"
        same = (s for s in unmatched.values() if (s.uuid == gpu.uuid if gpu.uuid else s.index == index))
        sample = next(same, None)
        if sample is None:
            problems.append(f"{name}: not found by the C core")
            continue
        del unmatched[sample.index]
        comparisons += _compare_gpu(name, earlier.get(sample.index, sample), gpu, sample)
    problems += [
        f"{sample.uuid or f'GPU {sample.index}'}: not found by pynvml" for sample in unmatched.values()
    ]
    return GpuReaderComparison(tuple(comparisons), tuple(problems))


def _compare_gpu(
    name: str, before: GpuSample, pynvml: ReferenceGpu, after: GpuSample
) -> Iterator[FieldComparison]:
    for field in GpuField:
        first, other, last = before[field], pynvml.readings[field], after[field]
        yield FieldComparison(name, field, first, other, last, compare_readings(field, first, other, last))


def compare_readings(field: GpuField, before: Reading, other: FieldValue, after: Reading) -> FieldAgreement:
    """Compare pynvml's reading `other` of a field with the C core's readings before and after it."""
    native = [value for value in (before, after) if not isinstance(value, Missing)]
    if not isinstance(other, int):
        # If one of the native readings failed, the field appeared or went away in between.
        return (FieldAgreement.UNREAD, FieldAgreement.MOVED, FieldAgreement.DIFFERS)[len(native)]
    if not native:
        return FieldAgreement.DIFFERS
    if min(native) <= other <= max(native):
        return FieldAgreement.AGREES
    return FieldAgreement.MOVED if field in CHANGING_FIELDS else FieldAgreement.DIFFERS


def confirm_moved(check: GpuReaderComparison, again: GpuReaderComparison) -> GpuReaderComparison:
    """Return `check`, with MOVED replaced by DIFFERS for each field that is constant in `again`.

    A field has moved only if a value of the C core or of pynvml has changed. Two constant values that
    differ are a contradiction between the readers.
    """
    second = {(comparison.gpu, comparison.field): comparison for comparison in again.comparisons}
    return check._replace(
        comparisons=tuple(
            comparison._replace(agreement=FieldAgreement.DIFFERS)
            if comparison.agreement is FieldAgreement.MOVED
            and _is_constant(comparison, second.get((comparison.gpu, comparison.field)))
            else comparison
            for comparison in check.comparisons
        )
    )


def _is_constant(first: FieldComparison, second: FieldComparison | None) -> bool:
    """Return whether two comparisons of one field have the same values; False if `second` is None."""
    if second is None or first.pynvml != second.pynvml:
        return False
    return len({*first.native_values, *second.native_values}) == 1


# --- the readers -------------------------------------------------------------------------------------------


def read_pynvml(config: Config) -> list[ReferenceGpu]:
    """Read every field of every GPU through pynvml. Blocks up to LIMIT_S.

    Raises:
        ProbeError: NVML cannot be used, or does not answer in time.
    """
    from agent.sources.nvml_reference import read_reference_gpus

    return read_within(LIMIT_S, lambda: read_reference_gpus(config.nvml_library, config.sysfs_root))


def cross_check(config: Config) -> GpuReaderComparison:
    """Read the GPUs with the C core, pynvml and the C core again, and compare the readings.

    If values changed between the readings, pynvml and the C core read once more.

    Raises:
        ProbeError: The C core cannot be started, or reads nothing within LIMIT_S.
    """
    from agent.native.gpu_watch import GpuWatch, GpuWatchOptions

    wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    deadline_ns = config.gpu_deadline_ns
    try:
        options = GpuWatchOptions(
            library=config.nvml_library,
            sysfs_root=config.sysfs_root,
            period_ns=PERIOD_NS,
            slow_ns=PERIOD_NS,
            deadline_ns=deadline_ns,
            retry_ns=NS,
        )
        gpus = GpuWatch(options, wake_fd)
        read_native = partial(_read_native, gpus, wake_fd, deadline_ns)
        try:
            gpus.start()
            before = read_native(None)
            if before.call and (_hangs(before, deadline_ns) or not _is_complete(before, None, deadline_ns)):
                return GpuReaderComparison(
                    not_compared_reason=f"pynvml was not called: NVML does not answer {before.call}"
                )
            if hanging := next((gpu for gpu in before.gpus if _hangs(gpu, deadline_ns)), None):
                name = hanging.uuid or f"GPU {hanging.index}"
                return GpuReaderComparison(
                    not_compared_reason=f"pynvml was not called: {name} does not answer {hanging.call}"
                )
            pynvml, after = _read_pynvml_or_error(config), read_native(before)
            check = compare_gpus(before, pynvml, after)
            if any(comparison.agreement is FieldAgreement.MOVED for comparison in check.comparisons):
                pynvml, last = _read_pynvml_or_error(config), read_native(after)
                check = confirm_moved(check, compare_gpus(after, pynvml, last))
            return check
        finally:
            gpus.stop(STOP_S)
    finally:
        os.close(wake_fd)


def _read_pynvml_or_error(config: Config) -> list[ReferenceGpu] | str:
    try:
        return read_pynvml(config)
    except ProbeError as error:
        return str(error)


def _read_native(gpus: GpuWatch, wake_fd: int, deadline_ns: int, before: NvmlSample | None) -> NvmlSample:
    """Return the readings of the C core.

    Block until each GPU was read again after `before`, or until LIMIT_S has passed.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        read = gpus.read()
        if read is not None and _is_complete(read, before, deadline_ns):
            return read
        if time.monotonic() > deadline:
            if read is None:
                raise ProbeError(f"C core: no GPU was read within {LIMIT_S:g} s; NVML hangs")
            return read
        select.select([wake_fd], [], [], PERIOD_NS / NS / 5)
        with suppress(BlockingIOError):
            os.eventfd_read(wake_fd)


def _is_complete(read: NvmlSample, before: NvmlSample | None, deadline_ns: int) -> bool:
    if read.nvml.state is SourceState.STARTING or len(read.gpus) < read.count:
        return False
    passes = {gpu.index: _complete_passes(gpu) for gpu in before.gpus} if before else {}
    # One pass may have begun before pynvml was called; the next one has not.
    wanted = 2 if before else 1
    return all(
        _hangs(gpu, deadline_ns) or _complete_passes(gpu) >= passes.get(gpu.index, 0) + wanted
        for gpu in read.gpus
    )


def _hangs(read: NvmlSample | GpuSample, deadline_ns: int) -> bool:
    """Return whether the NVML call in progress, if any, misses its deadline."""
    if not read.call or (isinstance(read, GpuSample) and not read.overdue):
        return False  # the C core gives a call that opens a GPU more time
    return time.monotonic_ns() - read.call_ns >= deadline_ns


def _complete_passes(gpu: GpuSample) -> int:
    """Return how often all fields of a GPU were read. For a failing GPU, return the number of attempts."""
    return gpu.passes if gpu.status else gpu.slow_passes


def read_in_child(read: Callable[[], T]) -> T:
    """Return the result of `read`, called in a child process with limited memory.

    If NVML crashes, only the child process ends.

    Call this function before the first thread is started, because a child process has a copy of one thread
    only.

    Raises:
        ProbeError: `read` raised it, or the child ended before it had a result.
    """
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        _send_result(sender, read)
    os.close(sender)
    with open(receiver, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(pid, 0)
    if not data:
        raise ProbeError(f"GPU readers: the process that called NVML {describe_exit(status)}")
    has_result, result = pickle.loads(data)
    if not has_result:
        raise ProbeError(result)
    return result  # type: ignore[no-any-return]


def _send_result(sender: int, read: Callable[[], T]) -> NoReturn:
    """Write the result of `read`, or the text of its error, to the parent process, and end this process."""
    status = 1
    try:
        with suppress(ValueError, OSError):  # a lower limit is set already
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_MAX, MEMORY_MAX))
        try:
            answer: tuple[bool, object] = True, read()
        except ProbeError as error:
            answer = False, str(error)
        data = pickle.dumps(answer)
        with open(sender, "wb") as stream:
            stream.write(data)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)  # not exit: the handlers are the parent's, and the library's own may hang


def read_within(seconds: float, read: Callable[[], T]) -> T:
    """Run `read` in a thread and return its result; the thread is abandoned if it hangs.

    Raises:
        ProbeError: `read` takes longer than `seconds`.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(read())
        except BaseException as error:
            errors.append(error)

    thread = DaemonThread(run, "pynvml")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise ProbeError(f"pynvml: no answer within {seconds:g} s; NVML hangs")
    return results[0]


# --- output ------------------------------------------------------------------------------------------------


def render_check(check: GpuReaderComparison, style: TextStyle) -> str:
    """Return the comparison as text: how many fields agree, and each field that differs or moved."""
    counts = Counter(comparison.agreement for comparison in check.comparisons)
    entries = [
        ListEntry(
            "backends",
            check.not_compared_reason
            or f"{format_count(counts[FieldAgreement.AGREES], 'reading')} of C core and pynvml agree, "
            f"{counts[FieldAgreement.DIFFERS]} differ, {counts[FieldAgreement.MOVED]} changed in between, "
            f"{counts[FieldAgreement.UNREAD]} cannot be read by either",
        )
    ]
    entries += [ListEntry("differs", clean(problem), ("red",)) for problem in check.problems]
    for agreement, paint in ((FieldAgreement.DIFFERS, ("red",)), (FieldAgreement.MOVED, ("dim",))):
        entries += [
            ListEntry(
                agreement, f"{clean(comparison.gpu)} {comparison.field}: {clean(comparison.values)}", paint
            )
            for comparison in check.comparisons
            if comparison.agreement is agreement
        ]
    return "\n".join(format_entries(entries, style)) + "\n"


def crosscheck_document(check: GpuReaderComparison) -> dict[str, Any]:
    """Return the comparison as JSON, for the key ``backends`` of ``scan -o json``."""
    counts = Counter(comparison.agreement for comparison in check.comparisons)
    shown = [
        comparison
        for comparison in check.comparisons
        if comparison.agreement in {FieldAgreement.DIFFERS, FieldAgreement.MOVED}
    ]
    return {
        **{agreement.value: counts[agreement] for agreement in FieldAgreement},
        "problems": list(check.problems),
        "note": check.not_compared_reason,
        "fields": [FIELD(comparison) for comparison in shown],
    }


def render_gpus(gpus: Sequence[ReferenceGpu], style: TextStyle) -> str:
    """Return pynvml's readings as a table with a line for each field and a column for each GPU."""
    heads = [
        style.paint(f"  {index}  {clean(gpu.uuid or '?')}  {clean(gpu.bus)}", "dim")
        for index, gpu in enumerate(gpus)
    ]
    table = TextTable("FIELD", *map(str, range(len(gpus))), indent=0)
    for field in GpuField:
        answers = (gpu.readings[field] for gpu in gpus)
        table.add(field, *(str(value) if isinstance(value, int) else clean(value.name) for value in answers))
    return "\n".join([*heads, *table.lines(style)]) + "\n"


def gpu_documents(gpus: Iterable[ReferenceGpu]) -> list[dict[str, Any]]:
    """Return pynvml's readings as JSON. If NVML refused a field, the value is the error text of NVML."""
    return [GPU(gpu) for gpu in gpus]


def _value(value: Reading | FieldValue) -> int | str:
    return value if isinstance(value, int) else str(value)


FIELD: Final = ObjectKeys(
    "gpu field standing:agreement native:native_values pynvml", native=encode_each(_value), pynvml=_value
)
GPU: Final = ObjectKeys(
    "uuid bus readings",
    readings=lambda readings: {field.value: _value(answer) for field, answer in readings.items()},
)


VERB = Subcommand(
    name="scan",
    summary="check the node once, without an agent",
    description=(
        "Reads the node twice, 250 ms apart, and shows the health of every device. Exits with 0 if all are "
        "healthy, 1 if the worst is degraded, 2 if it is unhealthy, 3 if it is unknown. Rules that need a "
        "longer history are listed as not evaluated. With --backend both, also exits with 3 if pynvml and "
        "the C core read different values from a GPU."
    ),
    examples=(
        ("drahealth scan", "every device, and what to do about those that are not healthy"),
        ("drahealth scan -o json | jq '.devices[].health'", "the same as JSON, for programs"),
    ),
    add_arguments=add_arguments,
    main=main,
)

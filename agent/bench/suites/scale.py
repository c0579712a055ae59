"""Growth of costs with the numbers of devices, cgroups and pods, as curves with a linear fit.

``drahealth explain pod`` and ``drahealth audit --all`` are measured as processes from start to end, including
their imports. The lower bound of explain is a program that only reads the same files as JSON.
"""

import contextlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.bench.file_trees import (
    NAMESPACE,
    CgroupTree,
    pod_object,
    real_or_file_tree,
    temporary_directory,
    write_cgroup_files,
    write_node_files,
    write_sysfs,
)
from agent.bench.processes import (
    DRIVER,
    HEALTH_METHOD,
    ProcessRun,
    Subscriber,
    drahealth_program,
    driver_socket,
    read_resident_bytes,
    run_program,
    start_agent,
    start_subscriber,
)
from agent.bench.result import (
    ResultMismatch,
    ResultRow,
    ResultTable,
    RunSize,
    SuiteOutcome,
    Unit,
    format_value,
    row_from_samples,
    rows_from_race,
)
from agent.bench.suites.poll import open_sampler, read_snapshot
from agent.bench.suites.report_path import declare_cpus, health_entries, snapshot_time
from agent.bench.timing import Contender, time_contenders
from agent.engine.step import EngineState, step
from agent.model.settings import EngineSettings
from agent.model.time import NS
from agent.native.health_encoder import encode_health_lists

POINTS_MIN: Final = 3


class LinearFit(NamedTuple):
    """Straight line through measured points, fitted by least squares."""

    slope: float
    """Increase of the measured value per device, cgroup or pod."""
    intercept: float
    """Measured value without any device, cgroup or pod."""
    r2: float | None
    """Coefficient of determination; None with fewer than three points or without variation."""


def fit_line(rows: Sequence[ResultRow]) -> LinearFit:
    """Fit a line to the medians of result rows over their ``x``.

    At least two values of ``x`` must be distinct.
    """
    points = [(row.x, row.median.median) for row in rows if row.x is not None]
    xs, ys = zip(*points, strict=True)
    slope, intercept = statistics.linear_regression(xs, ys)
    if len(points) < POINTS_MIN or len(set(ys)) == 1:
        return LinearFit(slope, intercept, None)
    return LinearFit(slope, intercept, statistics.correlation(xs, ys) ** 2)


def describe_fit(fitted: LinearFit, unit: Unit, item: str) -> str:
    """Format a fit: ``fit: 12.1 us + 0.48 us per device, R2 0.999``."""
    base, slope = format_value(abs(fitted.intercept), unit), format_value(abs(fitted.slope), unit)
    sign = "-" if fitted.intercept < 0 else ""
    operator = "-" if fitted.slope < 0 else "+"
    quality = "" if fitted.r2 is None else f", R2 {fitted.r2:.3f}"
    return f"fit: {sign}{base} {operator} {slope} per {item}{quality}"


LABELS: Final = {"floor": "lower bound"}
STEPS: Final = (0.1, 0.5, 1.0)
CLAIMS_PER_POD: Final = 2
REPORT_EXIT_CODES: Final = range(4)
"""Exit codes of commands that printed a report, by severity."""
READ_PROGRAM: Final = (
    "import json, sys\nfor path in {}:\n    with open(path, 'rb') as file:\n        json.load(file)"
)


def measure_explain_and_audit(run_size: RunSize, outcome: SuiteOutcome) -> None:
    """Measure ``drahealth explain pod`` and ``drahealth audit --all`` at several numbers of pods."""
    if run_size.pods:
        _measure_explain(run_size, outcome)
        _measure_audit(run_size, outcome)
    else:
        outcome.skipped.append("scale: consumers and audits: skipped by --quick")


def _add_process_curves(
    outcome: SuiteOutcome, title: str, runs: Mapping[str, Mapping[int, ProcessRun]], *notes: str
) -> None:
    """Add curves of time and memory by number of pods, with a fitted line for the first program."""
    times: list[ResultRow] = []
    sizes: list[ResultRow] = []
    for name, starts in runs.items():
        for pods, process in starts.items():
            label, x = f"{LABELS.get(name, name)}, {pods} pods", float(pods)
            timed = row_from_samples(f"scale.{name}.{pods}", label, (process.took_ns / NS,), "s")
            peak = row_from_samples(f"scale.{name}.{pods}.rss", label, (float(process.peak_rss),), "B")
            times.append(replace(timed, x=x))
            sizes.append(replace(peak, x=x))
    count = len(next(iter(runs.values())))
    for quantity, rows in (("from start to end", times), ("peak memory", sizes)):
        remarks = (describe_fit(fit_line(rows[:count]), rows[0].unit, "pod"), *notes)
        outcome.tables.append(
            ResultTable(quantity, tuple(rows), notes=remarks, section=title, grows_with="pods")
        )


def _measure_explain(run_size: RunSize, outcome: SuiteOutcome) -> None:
    runs: dict[str, dict[int, ProcessRun]] = {"explain": {}, "floor": {}}
    for pods in pod_counts(run_size.pods):
        with temporary_directory() as directory:
            files = write_node_files(directory, pods, CLAIMS_PER_POD * pods)
            name = f"{NAMESPACE}/pod-{pods // 2}"
            paths = ("--kubelet-dir", files.kubelet_dir, "--pods", files.pods, "--claims", files.claims)
            run = run_program(drahealth_program("explain", "pod", name, *paths), REPORT_EXIT_CODES)
            if f"claim-{pods // 2}" not in run.output:
                raise ResultMismatch(
                    f"drahealth explain pod {name}: the output does not name its claim-{pods // 2}"
                )
            runs["explain"][pods] = run
            runs["floor"][pods] = run_program(READ_PROGRAM.format([str(files.pods), str(files.claims)]))
    title = f"drahealth explain pod, {CLAIMS_PER_POD} claims for each"
    _add_process_curves(outcome, title, runs, "lower bound: the same files read as JSON")


def pod_counts(limit: int) -> list[int]:
    """Return the numbers of pods to measure, up to ``limit``."""
    return sorted({max(1, round(limit * step)) for step in STEPS})


def _measure_audit(run_size: RunSize, outcome: SuiteOutcome) -> None:
    runs: dict[str, dict[int, ProcessRun]] = {"audit": {}}
    backend = ""
    for pods in pod_counts(run_size.audited):
        with real_or_file_tree(2 * pods) as (tree, reason), temporary_directory() as directory:
            if reason:
                outcome.skipped.append(f"scale: {reason}; audited on {tree.backend}")
            file = directory / "pods.json"
            file.write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": burstable_pods(tree)}))
            roots = ("--cgroupfs-root", tree.cgroupfs, "--kubelet-cgroup-root", tree.kubelet_root)
            arguments = ("audit", "--all", "--pods", file, "--kubelet-dir", directory, "-o", "json", *roots)
            run = run_program(drahealth_program(*arguments), REPORT_EXIT_CODES)
            audited_pods = len(parse_audited_pods(run.output))
            if audited_pods != pods:
                raise ResultMismatch(
                    f"drahealth audit --all: {pods} pods have cgroups, {audited_pods} were audited"
                )
            runs["audit"][pods] = run
            backend = tree.backend
    title = f"drahealth audit --all, a container in each pod; {backend}"
    _add_process_curves(outcome, title, runs)


def burstable_pods(tree: CgroupTree) -> list[dict[str, Any]]:
    """Return the pods of ``tree`` as objects of the Kubernetes API; they request one CPU together.

    The cgroup of their QoS class then has the weight of a new cgroup. Otherwise the audit waits for a minute,
    in which the kubelet corrects the weight.
    """
    containers = [group for group in tree.groups if group[1]]
    milli, rest = divmod(1000, len(containers))
    requests = [{"cpu": f"{milli + (index < rest)}m", "memory": "64Mi"} for index in range(len(containers))]
    pods = [
        pod_object(f"pod-{index}", *group, {"requests": requests[index]})
        for index, group in enumerate(containers)
    ]
    for pod in pods:
        pod["status"]["qosClass"] = "Burstable"
    return pods


def parse_audited_pods(output: str) -> list[Any]:
    """Return the audited pods from the JSON document at the start of the output of ``drahealth audit``."""
    document, _ = json.JSONDecoder().raw_decode(output)
    pods = document["pods"]
    assert isinstance(pods, list)
    return pods


AGENTS: Final = 3
"""Number of device counts at which an agent's memory is measured, including the smallest and the largest."""


def run(run_size: RunSize) -> SuiteOutcome:
    """Measure encoding, evaluation, polling, memory of the agent, explain and audit at several sizes."""
    outcome = SuiteOutcome()
    _measure_time_curve(
        run_size, outcome, "encode", "device", "encode a list of devices", run_size.sizes, _prepare_encoding
    )
    _measure_time_curve(
        run_size,
        outcome,
        "decide",
        "device",
        "step(), quiet, declared devices",
        run_size.sizes,
        _prepare_evaluation,
    )
    with contextlib.ExitStack() as stack:
        poll = partial(_prepare_polling, stack)
        title = "a pass and a sweep over cgroups, files on tmpfs"
        _measure_time_curve(run_size, outcome, "poll", "cgroup", title, run_size.groups, poll)
    _measure_agent_memory(run_size, outcome)
    measure_explain_and_audit(run_size, outcome)
    return outcome


def add_curve(outcome: SuiteOutcome, title: str, rows: Sequence[ResultRow], unit: Unit, item: str) -> None:
    """Add a table with the curve of result rows over their ``x``, and the line fitted to the curve."""
    fitted = describe_fit(fit_line(rows), unit, item)
    outcome.tables.append(ResultTable(title, tuple(rows), notes=(fitted,), grows_with=f"{item}s"))


def _measure_time_curve(
    run_size: RunSize,
    outcome: SuiteOutcome,
    key: str,
    item: str,
    title: str,
    sizes: Sequence[int],
    work: Callable[[int], Callable[[], object]],
) -> None:
    """Time the same work at several sizes, alternating between the sizes, and add the curve."""
    contenders = [Contender(f"{size}", f"{size} {item}s", work(size)) for size in sizes]
    timed = time_contenders(contenders, rounds=run_size.warm_rounds, limit_s=run_size.warm_limit_s)
    plain = rows_from_race(f"scale.{key}", timed, contenders[0].key)
    rows = [replace(row, x=float(size), ratio=None) for row, size in zip(plain, sizes, strict=True)]
    add_curve(outcome, title, rows, "s", item)
    outcome.reference_ns += timed.reference


def _prepare_encoding(devices: int) -> Callable[[], object]:
    return partial(encode_health_lists, health_entries(devices))


def _prepare_evaluation(devices: int) -> Callable[[], object]:
    sampler = open_sampler(None)
    base = read_snapshot(sampler)
    sampler.stop(1.0)
    snapshot = replace(base, declared=declare_cpus(base, devices))
    now = snapshot_time(snapshot)
    state, _ = step(EngineState(EngineSettings("bench")), snapshot, now)
    return lambda: step(state, snapshot, now)


def _prepare_polling(stack: contextlib.ExitStack, groups: int) -> Callable[[], object]:
    sampler = open_sampler(write_cgroup_files(stack.enter_context(temporary_directory()), groups))
    stack.callback(sampler.stop, 1.0)

    def pass_and_sweep() -> None:
        sampler.run_pass()
        sampler.run_sweep()

    return pass_and_sweep


def _measure_agent_memory(run_size: RunSize, outcome: SuiteOutcome) -> None:
    """Measure the resident memory of agents with different numbers of declared devices.

    Each agent is measured after its first message to a subscriber.
    """
    sizes = run_size.sizes[:: -(-len(run_size.sizes) // AGENTS)]
    if sizes[-1] != run_size.sizes[-1]:
        sizes = (*sizes, run_size.sizes[-1])
    rows = []
    with contextlib.ExitStack() as stack:
        started = [(devices, *_start_agent_with_devices(stack, devices)) for devices in sizes]
        for devices, pid, client in started:
            client.wait(lambda line: bool(line.get("found")))
            row = row_from_samples(
                f"scale.rss.{devices}", f"{devices} devices", (read_resident_bytes(pid),), "B"
            )
            rows.append(replace(row, x=float(devices)))
    add_curve(outcome, "RSS of an agent after the first message to a subscriber", rows, "B", "device")


def _start_agent_with_devices(stack: contextlib.ExitStack, devices: int) -> tuple[int, Subscriber]:
    """Start an agent with declared devices.
    Return its PID and a subscriber that waits for the last device."""
    directory = stack.enter_context(temporary_directory())
    write_sysfs(directory / "sys")
    _write_declarations(directory / "run/devices.d", devices)
    flags = ["--cgroupfs-root", str(directory / "none"), "--sysfs-root", str(directory / "sys")]
    agent = stack.enter_context(start_agent(directory, flags))
    last = f"cpu-{devices - 1}\\x10"
    client = stack.enter_context(start_subscriber(driver_socket(directory), HEALTH_METHOD, last, agent))
    return agent.pid, client


def _write_declarations(directory: Path, devices: int) -> None:
    directory.mkdir(parents=True)
    entries = (
        f'[[device]]\nname = "cpu-{index}"\nkind = "cpu"\ncpus = "{index % 8}"\n' for index in range(devices)
    )
    (directory / f"{DRIVER}.toml").write_text("version = 1\n" + "".join(entries))

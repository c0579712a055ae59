"""All suites with the smallest run size: consistent figures, and errors that name the cause.

Speed itself is not tested.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from patience import PATIENCE_S
from wire.serving import eventually

from agent.bench.file_trees import real_cgroup_tree, temporary_directory, write_cgroup_files
from agent.bench.main import SUITES
from agent.bench.processes import (
    HEALTH_METHOD,
    UNIT_ENVIRONMENT,
    FakeNvml,
    FakeNvmlUnavailable,
    LowerBoundUnavailable,
    ProcessError,
    drahealth_program,
    run_program,
    split_into_batches,
    start_agent,
    start_hugepage_limit_hitter,
    start_lower_bound,
    start_memory_limit_hitter,
    start_module,
    write_gpu_scenario,
)
from agent.bench.result import (
    FULL,
    QUICK,
    MeasurementError,
    ResultMismatch,
    ResultRow,
    RunSize,
    SuiteOutcome,
    row_from_samples,
    rows_from_latencies,
)
from agent.bench.suites import poll, poll_gpus, soak
from agent.bench.suites.detect import HOPS, hop_times, measure_gpu_faults
from agent.bench.suites.detect_events import MEMORY_LIMIT
from agent.bench.suites.poll import (
    ReopeningReader,
    flatten_values,
    open_sampler,
    read_snapshot,
    sweep_files,
    sweep_values,
)
from agent.bench.suites.poll_gpus import GpuValues, check_equal, count_pass_calls
from agent.bench.suites.report_path import declare_cpus, snapshot_time, tail_ratio, without_lowest_cpu
from agent.bench.suites.scale import burstable_pods, describe_fit, fit_line, measure_explain_and_audit
from agent.engine.step import EngineState, step
from agent.model.gpu import GpuField
from agent.model.settings import EngineSettings

TINY: Final = replace(
    QUICK,
    warm_rounds=3,
    warm_limit_s=0.0,
    cold_rounds=1,
    groups=(2, 4),
    gpus=(2,),
    nvml_inside=True,
    oom_kills=1,
    publications=2,
    published_devices=(128, 1000),
    imports=True,
    idle_s=0.3,
    settle_s=0.0,
    sizes=(2, 8),
    soak_s=8.0,
)
EXPECTED: Final = {
    "poll": {"poll.pass.warm.core", "poll.groups4.situ.floor", "poll.groups2.warm.plain"}
    | {"poll.groups4.core_to_python", "poll.groups4.floor_to_python", "poll.groups2.half_to_sum"},
    "decide": {"decide.devices1000.change", "decide.groups1000.decode"},
    "encode": {"encode.8.core", "encode.128.betterproto", "encode.1000.core"},
    "publish": {"publish.1.server", "publish.64.frames", "publish.64.floor"}
    | {"publish.1.devices1000.server", "publish.1.devices1000.frames", "publish.1.devices1000.floor"},
    "detect": {"detect.file.10ms"},
    "trace": {f"trace.{key}" for key, _ in HOPS}
    | {"trace.wake", "trace.all", "trace.bare.trio", "trace.bare.asyncio", "trace.bare.socket"},
    "idle": {"idle.cpu.new", "idle.rss", "idle.rss.floor", "idle.wakes"},
    "startup": {"startup.floor", "startup.help.rss", "startup.list", "startup.imports"}
    | {"startup.8gpus.list", "startup.agent.rss.floor"},
    "scale": {"scale.encode.8", "scale.decide.2", "scale.poll.4", "scale.rss.8"},
    "soak": {"soak.rss.growth", "soak.descriptors.others.growth", "soak.kernel.growth", "soak.events"},
}


@pytest.mark.parametrize("name", sorted(SUITES.keys() - {"soak"}))
def test_suite_yields_consistent_rows(name: str) -> None:
    check_outcome(name, SUITES[name](TINY))


def test_short_soak_opens_no_descriptors_and_starts_no_threads() -> None:
    """Growth of memory needs a longer time. Files of cgroups are held within a budget, in any number.

    The agent opens the watches of three directories again after a change in one of them.
    """
    outcome = SUITES["soak"](TINY)
    check_outcome("soak", outcome)
    values = {row.key: row.values for table in outcome.tables for row in table.rows}
    for key, watches in (("soak.descriptors.others", 3), ("soak.threads", 0)):
        half = len(values[key]) // 2
        assert half >= 1
        assert min(values[key][half:]) <= max(values[key][:half]) + watches, values[key]


def check_outcome(name: str, outcome: SuiteOutcome) -> None:
    rows = [row for table in outcome.tables for row in table.rows]
    keys = [row.key for row in rows]
    assert {*keys} >= EXPECTED[name], outcome.skipped
    assert len({*keys}) == len(keys)
    for row in rows:
        check_row(name, row)
    assert all(table.title and (not table.reference or len(table.rows) > 1) for table in outcome.tables)


def check_row(suite: str, row: ResultRow) -> None:
    assert row.key.startswith(f"{suite}.")
    assert row.label
    assert row.values
    assert min(row.values) <= row.median.low <= row.median.median <= row.median.high <= row.max
    assert row.max == max(row.values)
    assert row.unit != "s" or min(row.values) > 0
    assert row.ratio is None or 0 < row.ratio.low <= row.ratio.high


def test_quick_run_size_is_smaller_than_full() -> None:
    names = RunSize.__slots__
    size = {name: lambda value: value if isinstance(value, int | float) else len(value) for name in names}
    assert all(size[name](getattr(QUICK, name)) <= size[name](getattr(FULL, name)) for name in names)


def test_tail_ratio_compares_the_p99_of_frames_and_bare_sockets() -> None:
    labels = {"frames": "frames", "floor": "lower bound"}
    times = {"frames": [2_000] * 97 + [6_000] * 3, "floor": [1_000] * 97 + [4_000] * 3}
    (ratio,) = tail_ratio(rows_from_latencies("publish.64", labels, times))
    assert (ratio.key, ratio.unit, ratio.values) == ("publish.64.p99_to_floor", "x", (1.5,))
    few = rows_from_latencies("publish.64", labels, {key: values[:9] for key, values in times.items()})
    assert not [*tail_ratio(few)]


def test_soak_states_growth_per_hour_of_a_long_run_without_its_warm_up() -> None:
    readings = [
        soak.Resources(at_s, 50_000_000 + 100 * max(0, at_s - 1000), 100 + at_s, at_s, 10, 1 << 20)
        for at_s in range(100, 3700, 100)
    ]
    table = soak.summarize(readings, 1234, 3600.0, "files")
    values = {row.key: row.values for row in table.rows}
    assert values["soak.rss.hour"] == (pytest.approx(360_000),)
    assert values["soak.descriptors.growth"] == (1800,)
    assert values["soak.descriptors.others"] == (100,) * 27
    assert values["soak.descriptors.others.growth"] == values["soak.threads.growth"] == (0,)
    assert len(values["soak.rss"]) == 27, "the first quarter does not count"
    assert min(values["soak.rss"]) == 50_000_000


def test_idle_measures_installed_peers_as_long_as_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "node_exporter"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    outcome = SUITES["idle"](replace(TINY, peers=True))
    keys = {row.key for table in outcome.tables for row in table.rows}
    assert {"idle.rss", "idle.peers.rss.agent", "idle.peers.rss.node_exporter"} <= keys
    assert [*keys].count("idle.rss") == 1


# --- equality of results -----------------------------------------------------------------------------------


@contextmanager
def fake_gpus(number: int) -> Iterator[FakeNvml]:
    with temporary_directory() as directory:
        try:
            fake = write_gpu_scenario(directory, number)
        except FakeNvmlUnavailable as reason:
            pytest.skip(str(reason))
        yield fake


def test_detect_compares_nvml_in_a_process_of_its_own_with_nvml_inside() -> None:
    with fake_gpus(1):
        outcome = SuiteOutcome()
        measure_gpu_faults(TINY, outcome)
    assert not outcome.skipped
    assert [row.key for row in outcome.tables[0].rows] == [
        "detect.nvml",
        "detect.nvml.inside",
        "detect.hang",
    ]


def test_poll_gpus_compares_all_values_of_all_gpus() -> None:
    with fake_gpus(2):
        outcome = SuiteOutcome()
        poll_gpus.run(TINY, outcome)
    table = outcome.tables[0]
    assert [row.key for row in table.rows] == [
        f"poll.gpus2.warm.{contender}" for contender in ("core", "floor", "good", "plain")
    ]
    equal = re.match(r"(\d+) values equal in core, good and plain; (\d+) NVML calls", table.notes[0])
    assert equal is not None
    assert int(equal[1]) % 2 == 0 < int(equal[1])
    assert int(equal[2]) == 2 * 4, "fields, temperature, margin and reasons of each"


def test_check_equal_different_gpu_value_raises_and_names_it() -> None:
    core: GpuValues = {(0, GpuField.TEMP): 33, (1, GpuField.REMAP_PENDING): 0}
    check_equal(core, dict(core), frozenset())
    with pytest.raises(ResultMismatch, match=r"gpu-1: field remap_pending: the C core read 0, pynvml 1"):
        check_equal(core, core | {(1, GpuField.REMAP_PENDING): 1}, frozenset())
    with pytest.raises(ResultMismatch, match=r"gpu-0: field temp: the C core read 33, pynvml None"):
        check_equal(core, {(1, GpuField.REMAP_PENDING): 0}, frozenset({GpuField.TEMP}))


def test_check_calls_different_number_raises() -> None:
    assert count_pass_calls(8, 8) == 8
    with pytest.raises(ResultMismatch, match="the C core makes 8 NVML calls, the lower bound 7"):
        count_pass_calls(8, 7)


def test_check_equal_varying_gpu_value_needs_only_exist() -> None:
    check_equal({(0, GpuField.TEMP): 33}, {(0, GpuField.TEMP): 35}, frozenset({GpuField.TEMP}))


CHANGED_GPU_PROGRAM: Final = """
import os, sys
from pathlib import Path
from agent.bench.suites.poll_gpus import PynvmlBatchReader, PynvmlPerValueReader, fast_values, read_set_of
from agent.bench.processes import FakeNvml
from agent.bench.suites.poll_gpus import check_equal, open_gpu_watch, read_gpus
from agent.sources.nvml import open_nvml_session
library, scenario, socket = map(Path, sys.argv[1:])
os.environ["FAKE_NVML"] = str(scenario)
with open_gpu_watch(str(library)) as gpus, open_nvml_session(str(library)) as nvml:
    gpus_read = read_gpus(gpus).gpus
    read_sets = [read_set_of(gpu) for gpu in gpus_read]
    readers = [PynvmlBatchReader(nvml.binding, read_sets), PynvmlPerValueReader(nvml.binding, read_sets)]
    with FakeNvml(library, scenario, socket).connect() as control:
        control.send("gpu 1 set remap.pending=1")
    for reader in readers:
        try:
            check_equal(fast_values(gpus_read), reader(), frozenset())
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
"""


def test_gpu_changed_between_readers_is_a_mismatch() -> None:
    with fake_gpus(2) as fake:
        arguments = [
            sys.executable,
            "-c",
            CHANGED_GPU_PROGRAM,
            str(fake.library),
            str(fake.scenario),
            str(fake.control),
        ]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert (
        done.stdout.splitlines()
        == ["ResultMismatch: gpu-1: field remap_pending: the C core read 0, pynvml 1"] * 2
    )


def test_cgroup_changed_between_readers_is_a_mismatch() -> None:
    with temporary_directory() as root:
        tree = write_cgroup_files(root, 4)
        sampler = open_sampler(tree)
        sampler.run_sweep()
        snapshot = read_snapshot(sampler)
        sampler.stop(PATIENCE_S)
        plain = ReopeningReader(sweep_files(tree, snapshot))
        uid, container = tree.groups[1]
        stat = tree.path("v2", uid, container) / "cpu.stat"
        stat.write_text(stat.read_text().replace("nr_throttled 0", "nr_throttled 7"))
        values = flatten_values(plain())
        with pytest.raises(ResultMismatch, match=f"{container}/cpu_throttled: the C core read 0, Python 7"):
            poll.check_equal("sweep", sweep_values(snapshot, values), values)


def test_without_lowest_cpu_changes_one_declared_device() -> None:
    sampler = open_sampler(None)
    base = read_snapshot(sampler)
    sampler.stop(PATIENCE_S)
    snapshot = replace(base, declared=declare_cpus(base, 3))
    now = snapshot_time(snapshot)
    state, before = step(EngineState(EngineSettings("bench")), snapshot, now)
    _, after = step(state, without_lowest_cpu(snapshot), now)
    changed_devices = {
        device.device
        for device, other in zip(after.devices, before.devices, strict=True)
        if device != other and device.driver
    }
    one_cpu = snapshot.cpus.online in {1, 2}
    assert changed_devices == ({"cpu-0", "cpu-1", "cpu-2"} if one_cpu else {"cpu-0"})


# --- consumers and audits ---------------------------------------------------------------------------------


def test_run_consumers_measures_explain_and_audit() -> None:
    outcome = SuiteOutcome()
    measure_explain_and_audit(replace(TINY, pods=10, audited=4), outcome)
    found = {row.key: row for table in outcome.tables for row in table.rows}
    assert {"scale.explain.10", "scale.floor.10.rss", "scale.audit.4", "scale.audit.4.rss"} <= found.keys()
    assert all(table.notes[0].startswith("fit: ") for table in outcome.tables)
    assert found["scale.explain.10.rss"].max > found["scale.floor.10.rss"].max


@pytest.mark.parametrize("pods", [1, 3, 25])
def test_audited_pods_request_the_cpu_weight_of_a_new_cgroup(pods: int) -> None:
    """1024 shares are 1000m. With other requests, the audit waits for a minute."""
    with temporary_directory() as root:
        objects = burstable_pods(write_cgroup_files(root, 2 * pods))
    requests = [pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] for pod in objects]
    assert len(requests) == pods
    assert sum(int(request.removesuffix("m")) for request in requests) == 1000


# --- fits and ratios ---------------------------------------------------------------------


def rows_at(*points: tuple[float, float]) -> list[ResultRow]:
    return [replace(row_from_samples(f"a.{x:g}", "", [y], "s"), x=x) for x, y in points]


def test_fit_recovers_slope_and_intercept() -> None:
    line = fit_line(rows_at((1, 12e-6), (8, 19e-6), (64, 75e-6)))
    assert line.slope == pytest.approx(1e-6)
    assert line.intercept == pytest.approx(11e-6)
    assert line.r2 == pytest.approx(1.0)
    assert describe_fit(line, "s", "device") == "fit: 11.0 us + 1.00 us per device, R2 1.000"


def test_fit_of_two_points_has_no_r2() -> None:
    assert (
        describe_fit(fit_line(rows_at((0, 1e-3), (10, 0.0))), "s", "pod") == "fit: 1.00 ms - 100 us per pod"
    )


def test_fit_of_scattered_points_has_low_r2() -> None:
    line = fit_line(rows_at((1, 1e-3), (2, 5e-3), (3, 1e-3)))
    assert line.r2 == pytest.approx(0.0, abs=1e-9)


def test_hop_times_sum_to_the_total() -> None:
    stamps = {key: 100 + 10 * index for index, (key, _) in enumerate(HOPS)}
    taken = hop_times(stamps, 40)
    assert taken == {key: 60 if index == 0 else 10 for index, (key, _) in enumerate(HOPS)}
    assert sum(taken.values()) == stamps["client"] - 40


def test_latency_ratio_is_paired_by_cause() -> None:
    """The second cause is slow for both contenders."""
    rows = rows_from_latencies(
        "a", {"agent": "A", "floor": "F"}, {"agent": [20, 200, 30], "floor": [10, 100, 15]}
    )
    assert [row.key for row in rows] == ["a.agent", "a.floor"]
    assert rows[0].ratio is not None
    assert rows[0].ratio.low == rows[0].ratio.high == 2.0


def test_batches_contain_each_number_once() -> None:
    assert [*split_into_batches(7, 3)] == [range(3), range(3, 6), range(6, 7)]
    assert [*split_into_batches(0, 3)] == []


# --- processes --------------------------------------------------------------------------------------------


def test_crowd_reports_when_its_last_subscriber_has_a_message() -> None:
    with temporary_directory() as directory, socket.socket(socket.AF_UNIX) as listener:
        path = directory / "crowd.sock"
        listener.bind(str(path))
        listener.listen()
        with start_module("agent.bench.subscribers", path, "bare", 4) as crowd:
            crowd.send_line("2")
            connections = [listener.accept()[0] for _ in range(2)]
            assert crowd.wait() == {"subscribers": 2}
            for data in (b"ab", b"cd"):
                for connection in connections:
                    connection.sendall(data)
            assert crowd.wait().keys() == {"t_ns"}
            crowd.send_line("3")
            connections.append(listener.accept()[0])
            assert crowd.wait() == {"subscribers": 3}
            connections[0].sendall(b"full")
            with pytest.raises(ProcessError, match=r"no expected line within 0\.2 s"):
                crowd.wait(timeout_s=0.2)
            for connection in connections:
                connection.close()


@pytest.mark.parametrize("kind", ["frames", "follow"])
def test_client_waits_for_a_socket_that_exists_and_does_not_listen(kind: str) -> None:
    with temporary_directory() as directory, socket.socket(socket.AF_UNIX) as listener:
        path = directory / "late.sock"
        with start_module("agent.bench.subscribers", path, kind, HEALTH_METHOD, "") as client:
            client.send_line("1")
            listener.bind(str(path))
            with pytest.raises(ProcessError, match="no expected line within"):
                client.wait(lambda line: "client" not in line, timeout_s=1.5)
            client.require_running()
            listener.listen()
            listener.settimeout(PATIENCE_S)
            listener.accept()[0].close()


def test_publisher_sends_to_each_client_whose_connect_returned() -> None:
    """The publisher is stopped meanwhile, so that it accepts no client before it reads the line."""
    with temporary_directory() as directory, start_module("agent.bench.publisher", directory, 1) as publisher:
        size = publisher.wait(lambda line: "ready" in line)["size"]
        with contextlib.ExitStack() as stack:
            clients: list[socket.socket] = []
            for _ in range(8):
                os.kill(publisher.pid, signal.SIGSTOP)
                for _ in range(8):
                    clients.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
                    clients[-1].connect(str(directory / "bare.sock"))
                publisher.send_line("bare")
                os.kill(publisher.pid, signal.SIGCONT)
                publisher.wait()
                assert {len(client.recv(2 * size, socket.MSG_DONTWAIT)) for client in clients} == {size}


def test_lower_bound_reports_a_change_of_a_file(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.touch()
    try:
        with start_lower_bound("inotify", *files) as lower_bound:
            files[1].write_text("changed")
            line = lower_bound.wait()
    except LowerBoundUnavailable as reason:
        pytest.skip(str(reason))
    assert line["file"] == 1
    assert line["t_ns"] > 0


def test_peak_rss_excludes_the_parent_process() -> None:
    """This process uses more memory than an empty interpreter."""
    small, large = run_program("pass"), run_program("area = bytearray(64 << 20)")
    assert large.peak_rss - small.peak_rss > 60 << 20
    assert small.peak_rss < 32 << 20


def test_failed_program_raises() -> None:
    with pytest.raises(MeasurementError, match="exit status 3"):
        run_program("import sys; sys.exit(3)")
    assert run_program("import sys; sys.exit(3)", exit_codes=(3,)).took_ns > 0


def test_drahealth_program_passes_its_arguments() -> None:
    assert "usage: drahealth checks" in run_program(drahealth_program("checks", "--help")).output


def test_start_module_ends_its_process() -> None:
    with start_hugepage_limit_hitter() as hitter:
        pid = hitter.pid
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


def test_child_of_memory_limit_hitter_is_killed_by_the_kernel() -> None:
    try:
        with real_cgroup_tree(2) as tree, start_memory_limit_hitter() as hitter:
            group = MEMORY_LIMIT.set_limit(tree, *tree.groups[1])
            before_ns = time.monotonic_ns()
            hitter.send_line(str(group))
            line = hitter.wait()
            counts = group / "memory.oom_control"
            if not counts.exists():
                counts = group / "memory.events"
            assert "oom_kill 1\n" in counts.read_text()
    except OSError as error:
        pytest.skip(f"may not limit the memory of cgroups: {error}")
    assert line["is_hit"]
    assert before_ns < line["t_ns"] < line["ended_ns"] < time.monotonic_ns()


def environ_of_agent(directory: Path, extra: dict[str, str]) -> set[str]:
    """Return the environment of an agent that a suite starts."""
    with start_agent(directory, [], environment=extra) as agent:
        environ = Path(f"/proc/{agent.pid}/environ")
        eventually(environ.read_text, "the kernel has set up the program")
        return set(environ.read_text().split("\0"))


def test_agent_of_a_suite_has_the_environment_of_the_unit(tmp_path: Path) -> None:
    unit = (Path(__file__).parents[1] / "deploy/drahealth.service").read_text()
    variables = dict(re.findall(r"^Environment=(\w+)=(.*)$", unit, re.MULTILINE))
    assert variables == UNIT_ENVIRONMENT
    assert {f"{name}={value}" for name, value in variables.items()} <= environ_of_agent(tmp_path, {})
    assert "PYTHONMALLOC=pymalloc" in environ_of_agent(tmp_path, {"PYTHONMALLOC": "pymalloc"})

"""Changes between two reports, and the lines of the log."""

import io
import json
import logging
import os
from dataclasses import replace

import pytest
from cli_reports import (
    BUSY,
    CONTAINED,
    FAULT,
    GPUS,
    HIT,
    HUNG,
    LOST,
    SHRUNK,
    THROTTLED,
    device,
    gpu,
    instant,
    mig_instance,
    report,
    source,
)

from agent.cli.output.log import (
    CHANGE,
    LEVEL_OF_SEVERITY,
    PRIORITIES,
    LineFormatter,
    is_journal,
    log_formatter,
)
from agent.cli.output.report_changes import ReportChange, changes_between_reports
from agent.model.health import NonDeviceCause, Severity
from agent.model.reading import SourceState
from agent.model.report import Report
from agent.model.snapshot import NativeCoreStats


def test_first_report_lists_devices_and_failing_sources():
    lines = [str(change) for change in changes_between_reports(None, BUSY)]
    assert lines[0] == "2026-11-21T10:04:04Z cpu-node0 Healthy"
    assert lines[3] == (
        "2026-11-21T10:04:04Z hugepages-2mi-node0 Unhealthy "
        "mem.hugepages.pool_shrunk: 500 pages, 512 at start; cpu.throttled.core: 10 events or more in 60 s"
    )
    assert lines[5].startswith(
        "2026-11-21T10:04:04Z source hugepages failing hugepages-1048576kB/nr_hugepages:"
    )
    assert lines[8].startswith("2026-11-21T10:04:04Z pod 0f3c7a52")
    assert lines[6] == "2026-11-21T10:04:04Z source cgroups absent no kubepods below /sys/fs/cgroup"
    assert lines[7] == "2026-11-21T10:04:04Z cgroups incomplete 2 not watched, see cgroups.max-groups"
    assert len(lines) == 9


def test_unchanged_report_has_no_changes():
    again = replace(BUSY, devices=tuple(d._replace(verified=instant()) for d in BUSY.devices))
    assert changes_between_reports(BUSY, again) == []


def test_changed_device_is_the_only_change():
    before = report(device("cpu-node0"), device("cpu-node1"))
    now = report(device("cpu-node0"), device("cpu-node1", THROTTLED))
    (change,) = changes_between_reports(before, now)
    assert change.text == "cpu-node1 Degraded cpu.throttled.core: 10 events or more in 60 s"
    assert change.severity is Severity.DEGRADED
    (back,) = changes_between_reports(now, before)
    assert back.text == "cpu-node1 Healthy"


def test_new_cause_of_an_unhealthy_device_is_a_change():
    before = report(device("hugepages-2mi-node0", SHRUNK))
    assert len(changes_between_reports(before, report(device("hugepages-2mi-node0", SHRUNK, THROTTLED)))) == 1


def test_missing_device_is_a_change():
    (change,) = changes_between_reports(report(device("gpu-0"), device("gpu-1")), report(device("gpu-0")))
    assert change.text == "gpu-1 gone no longer reported"
    assert change.severity is Severity.UNKNOWN


def test_devices_of_two_pools_are_separate():
    before = report(device("gpu-0"), device("gpu-0", pool="other"))
    now = report(device("gpu-0"), device("gpu-0", SHRUNK, pool="other"))
    assert [change.subject for change in changes_between_reports(before, now)] == ["other/gpu-0"]


def test_source_state_is_a_change_but_its_failure_count_is_not():
    def report_of_source(state: SourceState, failures: int, detail: str = "") -> object:
        return report(sources=(source("cpus", state, failures, detail),))

    healthy, bad = report_of_source(SourceState.OK, 0), report_of_source(SourceState.FAILING, 1, "EIO")
    assert [c.text for c in changes_between_reports(healthy, bad)] == ["source cpus failing EIO"]
    assert changes_between_reports(bad, report_of_source(SourceState.FAILING, 2, "EIO")) == []
    assert [c.text for c in changes_between_reports(bad, report_of_source(SourceState.OK, 2, "EIO"))] == [
        "source cpus ok"
    ]


def test_node_without_devices_lists_absent_sources():
    found = changes_between_reports(
        None, report(sources=(source("cpus", SourceState.ABSENT), source("throttle")))
    )
    assert [c.text for c in found] == ["devices none no device was found", "source cpus absent"]
    (change,) = changes_between_reports(report(), report(device("gpu-0")))
    assert change.text == "gpu-0 Healthy"


def test_unwatched_cgroups_are_a_change():
    def report_of_core(**core: int) -> Report:
        return report(device("gpu-0"), sources=(source("cgroups"),), core=NativeCoreStats(**core))

    good, worse = report_of_core(), report_of_core(groups_dropped=2000, unwatched=1)
    (change,) = changes_between_reports(good, worse)
    assert change.text == (
        "cgroups incomplete 2,000 not watched, see cgroups.max-groups; "
        "the kernel refused 1 inotify watch, read by the sweep instead"
    )
    assert change.severity is Severity.DEGRADED
    assert changes_between_reports(worse, worse) == []
    assert [c.text for c in changes_between_reports(worse, good)] == ["cgroups ok"]


def test_each_inotify_overflow_is_a_change():
    before, now = report(core=NativeCoreStats(overflows=1)), report(core=NativeCoreStats(overflows=2))
    (change,) = changes_between_reports(before, now)
    assert change.text == "inotify overflowed 2 times, and everything was read again each time"
    assert changes_between_reports(now, now) == []


def test_unchanged_note_is_no_change():
    noted = report(notes=(NonDeviceCause("pod 1", HIT),))
    (change,) = changes_between_reports(report(), noted)
    assert change.text == "pod 1 note cgroup.hugetlb.max_hit: 2MB limit of 64 MiB hit"
    assert changes_between_reports(noted, noted) == []


def test_container_id_in_a_change_is_cut_to_13_digits():
    (change,) = changes_between_reports(
        report(), report(notes=(NonDeviceCause(f"pod 1 container {'9b1d' * 16}", HIT),))
    )
    assert change.text.startswith("pod 1 container 9b1d9b1d9b1d9 note ")


def test_note_with_new_evidence_and_its_end_are_changes():
    hung, worse = (
        report(notes=(NonDeviceCause("node", cause),)) for cause in (HUNG, replace(HUNG, evidence="two"))
    )
    assert [c.text for c in changes_between_reports(report(), hung)] == [
        "node Degraded node.hung_task: blocked for minutes: dd"
    ]
    assert [c.text for c in changes_between_reports(hung, worse)] == ["node Degraded node.hung_task: two"]
    (ended,) = changes_between_reports(worse, report())
    assert (ended.text, ended.severity) == ("node over node.hung_task", Severity.OK)


@pytest.mark.parametrize("container", ["", f" container {'c' * 64}"])
def test_pod_name_that_comes_or_goes_is_no_change(container: str):
    named = NonDeviceCause(f"pod u-1 (team-a/train-0){container}", HUNG)
    unnamed = NonDeviceCause(f"pod u-1{container}", HUNG)
    assert changes_between_reports(report(notes=(named,)), report(notes=(unnamed,))) == []
    assert changes_between_reports(report(notes=(unnamed,)), report(notes=(named,))) == []
    other = NonDeviceCause(f"pod u-2 (team-a/train-0){container}", HUNG)
    states = [
        found_report.state
        for found_report in changes_between_reports(report(notes=(named,)), report(notes=(other,)))
    ]
    assert states == ["Degraded", "over"]


def test_new_source_is_a_change_only_if_it_fails():
    before = report(device("cpu-node0"), sources=(source("cpus"),))
    states = (SourceState.STARTING, SourceState.OK, SourceState.FAILING)
    starting, working, failing = (replace(before, sources=(source("cpus"), source("pci", s))) for s in states)
    assert changes_between_reports(before, starting) == changes_between_reports(starting, working) == []
    assert [c.text for c in changes_between_reports(starting, failing)] == ["source pci failing"]


def test_absent_uevents_are_a_change_with_the_reason():
    absent = source("uevents", SourceState.ABSENT, 0, "none in this namespace", vital=False)
    (_, *others) = changes_between_reports(None, report(device("cpu-node0"), sources=(absent,)))
    assert [c.text for c in others if c.subject == "source uevents"] == [
        "source uevents absent none in this namespace"
    ]


def test_change_is_one_printable_line():
    (change,) = changes_between_reports(
        None, report(device("gpu-0", severity=Severity.UNHEALTHY, message="a\nb\x1b[2J"))
    )
    assert str(change).isprintable()


def test_fault_of_a_gpu_and_its_instances_is_one_line():
    healthy = report(gpu(1), *(mig_instance(n, 1) for n in range(7)))
    (change,) = changes_between_reports(
        healthy, report(gpu(1, LOST), *(mig_instance(n, 1, LOST) for n in range(7)))
    )
    assert change.subject == "gpu-1"
    assert change.text == (
        "gpu-1 Unhealthy gpu.lost: NVML returned 15, the GPU is lost (and its 7 instances; "
        "NVIDIA A100-SXM4-40GB, GPU-00000001, 0000:1c:00.0, serial 1650001)"
    )


def test_instance_worse_than_its_gpu_has_its_own_line():
    before, now = (
        report(gpu(1), mig_instance(1, 1)),
        report(gpu(1, LOST), mig_instance(1, 1, LOST, CONTAINED)),
    )
    assert [change.subject for change in changes_between_reports(before, now)] == ["gpu-1", "gpu-1-mig-1-0"]
    (change,) = changes_between_reports(
        report(gpu(1), mig_instance(1, 1)), report(gpu(1), mig_instance(1, 1, CONTAINED))
    )
    assert change.subject == "gpu-1-mig-1-0"


def test_first_report_has_one_line_per_healthy_gpu():
    lines = [change.text for change in changes_between_reports(None, GPUS)]
    assert lines[0] == "gpu-0 Healthy (and its 7 instances)"
    names = ["gpu-0", "gpu-1", "gpu-2", "gpu-2-mig-1-0", "gpu-2-mig-2-0", "gpu-3"]
    assert [line.split()[0] for line in lines] == names
    assert lines[2] == "gpu-2 Healthy (and 1 of its 3 instances)"


def test_gone_instances_share_the_line_of_their_gone_gpu():
    without_mig, with_mig = report(gpu(1)), report(gpu(1), mig_instance(1, 1), mig_instance(2, 1))
    assert [c.text for c in changes_between_reports(with_mig, without_mig)] == [
        f"gpu-1-mig-{n}-0 gone no longer reported" for n in (1, 2)
    ]
    (change,) = changes_between_reports(
        replace(with_mig, devices=(gpu(0), *with_mig.devices)), report(gpu(0))
    )
    assert change.text == "gpu-1 gone no longer reported (and its 2 instances)"


def test_hardware_identity_is_no_change():
    plain = gpu(1, LOST)._replace(attributes=())
    assert changes_between_reports(report(plain), report(gpu(1, LOST))) == []
    assert changes_between_reports(report(gpu(1)), report(gpu(1, FAULT)))[0].details == ""


def test_absent_nvml_is_a_change_only_if_it_was_there():
    absent = source("nvml", SourceState.ABSENT, 0, "no libnvidia-ml.so.1", vital=False)
    assert [
        c.subject for c in changes_between_reports(None, report(device("cpu-node0"), sources=(absent,)))
    ] == ["cpu-node0"]
    back = report(device("cpu-node0"), sources=(absent._replace(state=SourceState.OK),))
    assert [
        c.text for c in changes_between_reports(back, report(device("cpu-node0"), sources=(absent,)))
    ] == ["source nvml absent"]


# --- the log -----------------------------------------------------------------------------------------------


def format_record(level: int, text: str, *, journal: bool, error: BaseException | None = None) -> str:
    info = (type(error), error, error.__traceback__) if error else None
    record = logging.LogRecord("agent.x", level, __file__, 1, "%s", (text,), info)
    record.created = 1_795_255_444.9
    return LineFormatter(journal=journal).format(record)


def test_line_on_a_terminal_has_time_and_level():
    assert format_record(logging.INFO, "hello", journal=False) == "2026-11-21T10:04:04Z info hello"


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 2)],
)
def test_line_for_the_journal_has_a_priority_and_no_time(level, priority):
    assert format_record(level, "hello", journal=True) == f"<{priority}>hello"
    assert {number for _, number in PRIORITIES} == {2, 3, 4, 6, 7}


def test_every_line_of_a_traceback_has_the_priority():
    lines = format_record(logging.ERROR, "hello", journal=True, error=ValueError("a\nb")).splitlines()
    assert lines == ["<3>hello", "<3>ValueError: a", "<3>b"]


def test_log_levels_rise_with_severity():
    levels = [LEVEL_OF_SEVERITY[severity] for severity in Severity]
    assert levels == sorted(levels)


def test_journal_is_recognized_by_device_and_inode(tmp_path):
    with (tmp_path / "log").open("w") as stream:
        stat = os.fstat(stream.fileno())
        assert is_journal(stream, {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"})
        assert not is_journal(stream, {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino + 1}"})
        assert not is_journal(stream, {})
    assert not is_journal(io.StringIO(), {"JOURNAL_STREAM": "1:2"})


def test_info_cause_of_a_healthy_device_is_a_change():
    (change,) = changes_between_reports(report(gpu(0)), report(gpu(0, FAULT)))
    assert (change.text, change.severity) == ("gpu-0 Healthy gpu.xid.31: 1 time", Severity.INFO)


def test_source_of_a_reported_gpu_has_no_line():
    before = report(gpu(0), sources=(source("gpu-0"), source("nvml")))
    fails = (source("gpu-0", SourceState.FAILING, 1, "NVML returned 15"), source("nvml"))
    lines = [change.text for change in changes_between_reports(before, report(gpu(0, LOST), sources=fails))]
    assert [line.split()[0] for line in lines] == ["gpu-0"]


def test_source_with_the_name_of_a_declared_device_has_a_line():
    declared = gpu(0)._replace(driver="nic.example.com", device="nic", kind="nic")
    fails = (source("nic", SourceState.FAILING, 5, "sysfs: EIO"),)
    assert "source nic" in [
        report.subject for report in changes_between_reports(None, report(declared, sources=fails))
    ]


def test_source_of_an_unreported_gpu_has_a_line():
    before = report(gpu(0), sources=(source("gpu-1"),))
    fails = (source("gpu-1", SourceState.FAILING, 1, "NVML returned 3"),)
    assert [change.subject for change in changes_between_reports(before, report(gpu(0), sources=fails))] == [
        "source gpu-1"
    ]


def test_every_line_of_a_warning_has_the_priority():
    text = "a.py:1: UserWarning: hello\n  warn()\n"
    lines = ["<4>a.py:1: UserWarning: hello", "<4>  warn()"]
    assert format_record(logging.WARNING, text, journal=True).splitlines() == lines


def test_failure_has_a_priority_only_for_the_journal():
    text = "Traceback\nValueError"
    assert LineFormatter(journal=True).format_failure(text) == "<3>Traceback\n<3>ValueError"
    assert LineFormatter(journal=False).format_failure(text) == text


# --- lines as JSON -----------------------------------------------------------------------------------------


def entry(record: logging.LogRecord, *, journal: bool = False) -> dict[str, object]:
    """Return the object of a record's line, without the priority for the journal."""
    line = log_formatter("json", journal=journal).format(record)
    assert "\n" not in line
    found: dict[str, object] = json.loads(line[3:] if journal else line)
    return found


def test_json_line_has_time_level_text_and_logger():
    record = logging.LogRecord(
        "agent.example", logging.WARNING, "f", 1, "%s: two\nlines \udc80", ("a",), None
    )
    record.created = 1_795_255_444.5
    assert entry(record) == {
        "time": "2026-11-21T10:04:04.500Z",
        "level": "warning",
        "message": "a: two\nlines \udc80",
        "logger": "agent.example",
    }


@pytest.mark.parametrize(("level", "priority"), [(logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3)])
def test_json_line_for_the_journal_keeps_its_priority(level, priority):
    record = logging.LogRecord("a", level, "f", 1, "text", (), None)
    assert log_formatter("json", journal=True).format(record).startswith(f"<{priority}>{{")
    assert entry(record, journal=True)["message"] == "text"


def test_json_line_of_an_error_has_the_traceback():
    info = (ValueError, ValueError("broken"), None)
    found = entry(logging.LogRecord("a", logging.ERROR, "f", 1, "text", (), info))
    assert str(found["exception"]).endswith("ValueError: broken")


def test_json_line_of_the_error_that_ends_the_agent_is_one_entry():
    line = log_formatter("json", journal=False).format_failure("drahealth: two\nlines")
    found = json.loads(line)
    assert (found["level"], found["message"]) == ("error", "drahealth: two\nlines")


@pytest.mark.parametrize(("code", "more"), [("", {}), ("node.oom", {"code": "node.oom"})])
def test_json_line_of_a_change_names_object_state_and_severity(code, more):
    change = ReportChange(0.0, "gpu-0", "Unhealthy", Severity.UNHEALTHY, "gpu.lost: text", code)
    record = logging.makeLogRecord({"msg": change.text, CHANGE: change, "levelno": logging.ERROR})
    found = entry(record)
    named = {"object": "gpu-0", "state": "Unhealthy", "severity": "unhealthy"} | more
    assert {key: found.get(key) for key in ("object", "state", "severity", "code") if key in found} == named
    assert found["message"] == change.text


@pytest.mark.parametrize("letter", ["a", "\u00e9"])
def test_line_of_a_change_is_shorter_than_4_kib(letter: str):
    causes = [replace(THROTTLED, evidence=f"{letter * 99} " * 30) for _ in range(3)]
    long = device("cpu-node0", *causes, message="", severity=Severity.INFO, serial="42")
    note = NonDeviceCause("pod " + "p" * 300, replace(THROTTLED, evidence=f"{letter * 99} " * 90))
    lines = [str(change) for change in changes_between_reports(None, report(long, notes=(note,)))]
    sizes = [len(f"{line}\n".encode()) for line in lines]
    assert len(lines) == 2
    assert all(4000 < size <= 4096 for size in sizes)
    assert all(line.endswith("...") for line in lines)

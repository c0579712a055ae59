"""Lines of news: what a log and a pipe are told of a report, given the one before."""

import io
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
    instance,
    instant,
    report,
    source,
)

from agent.cli.output.changes import changes
from agent.cli.output.log import LEVEL_OF_SEVERITY, PRIORITIES, LineFormatter, is_journal
from agent.model.health import Note, Severity
from agent.model.report import Report
from agent.model.snapshot import CoreStats
from agent.model.source import SourceState


def test_a_first_report_tells_every_device_and_the_sources_that_are_not_well():
    lines = [str(change) for change in changes(None, BUSY)]
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
    assert lines[7] == "2026-11-21T10:04:04Z cgroups incomplete 2 found no room, see cgroups.max-groups"
    assert len(lines) == 9


def test_the_same_again_is_no_news_even_if_verified_again():
    again = replace(BUSY, devices=tuple(d._replace(verified=instant()) for d in BUSY.devices))
    assert changes(BUSY, again) == []


def test_a_device_that_changed_is_told_and_no_other():
    before = report(device("cpu-node0"), device("cpu-node1"))
    now = report(device("cpu-node0"), device("cpu-node1", THROTTLED))
    (change,) = changes(before, now)
    assert change.words == "cpu-node1 Degraded cpu.throttled.core: 10 events or more in 60 s"
    assert change.severity is Severity.DEGRADED
    (back,) = changes(now, before)
    assert back.words == "cpu-node1 Healthy"


def test_a_new_cause_of_a_device_that_is_sick_already_is_news():
    before = report(device("hugepages-2mi-node0", SHRUNK))
    assert len(changes(before, report(device("hugepages-2mi-node0", SHRUNK, THROTTLED)))) == 1


def test_a_device_that_is_no_longer_reported_is_told():
    (change,) = changes(report(device("gpu-0"), device("gpu-1")), report(device("gpu-0")))
    assert change.words == "gpu-1 gone no longer reported"
    assert change.severity is Severity.UNKNOWN


def test_the_same_name_in_two_pools_is_two_devices():
    before = report(device("gpu-0"), device("gpu-0", pool="other"))
    now = report(device("gpu-0"), device("gpu-0", SHRUNK, pool="other"))
    assert [change.subject for change in changes(before, now)] == ["other/gpu-0"]


def test_a_source_that_fails_and_recovers_is_told_but_not_each_failure():
    def seen(state: SourceState, failures: int, detail: str = "") -> object:
        return report(sources=(source("cpus", state, failures, detail),))

    well, bad = seen(SourceState.OK, 0), seen(SourceState.FAILING, 1, "EIO")
    assert [c.words for c in changes(well, bad)] == ["source cpus failing EIO"]
    assert changes(bad, seen(SourceState.FAILING, 2, "EIO")) == []
    assert [c.words for c in changes(bad, seen(SourceState.OK, 2, "EIO"))] == ["source cpus ok"]


def test_a_node_without_devices_is_told_with_what_is_absent():
    found = changes(None, report(sources=(source("cpus", SourceState.ABSENT), source("throttle"))))
    assert [c.words for c in found] == ["devices none no device was found", "source cpus absent"]
    (change,) = changes(report(), report(device("gpu-0")))
    assert change.words == "gpu-0 Healthy"


def test_cgroups_that_are_not_watched_as_they_should_be_are_told_on_change():
    def seen(**core: int) -> Report:
        return report(device("gpu-0"), sources=(source("cgroups"),), core=CoreStats(**core))

    well, worse = seen(), seen(groups_dropped=2000, unwatched=1)
    (change,) = changes(well, worse)
    assert change.words == (
        "cgroups incomplete 2,000 found no room, see cgroups.max-groups; "
        "the kernel refused 1 inotify watch, read by the sweep instead"
    )
    assert change.severity is Severity.DEGRADED
    assert changes(worse, worse) == []
    assert [c.words for c in changes(worse, well)] == ["cgroups ok"]


def test_each_overflow_of_the_kernels_queue_is_told():
    before, now = report(core=CoreStats(overflows=1)), report(core=CoreStats(overflows=2))
    (change,) = changes(before, now)
    assert change.words == "inotify overflowed 2 times, and everything was read again each time"
    assert changes(now, now) == []


def test_a_note_is_told_once():
    noted = report(notes=(Note("pod 1", HIT),))
    (change,) = changes(report(), noted)
    assert change.words == "pod 1 note cgroup.hugetlb.max_hit: 2MB limit of 64 MiB hit"
    assert changes(noted, noted) == []


def test_the_id_of_a_container_is_as_short_as_crictl_takes_it():
    (change,) = changes(report(), report(notes=(Note(f"pod 1 container {'9b1d' * 16}", HIT),)))
    assert change.words.startswith("pod 1 container 9b1d9b1d9b1d9 note ")


def test_a_note_is_told_again_when_it_says_something_else_and_when_it_is_over():
    hung, worse = (report(notes=(Note("node", cause),)) for cause in (HUNG, replace(HUNG, evidence="two")))
    assert [c.words for c in changes(report(), hung)] == [
        "node Degraded node.hung_task: blocked for minutes: dd"
    ]
    assert [c.words for c in changes(hung, worse)] == ["node Degraded node.hung_task: two"]
    (over,) = changes(worse, report())
    assert (over.words, over.severity) == ("node over node.hung_task", Severity.OK)


def test_a_source_that_is_new_is_no_news_until_it_is_not_well():
    before = report(device("cpu-node0"), sources=(source("cpus"),))
    states = (SourceState.STARTING, SourceState.OK, SourceState.FAILING)
    starting, well, failing = (replace(before, sources=(source("cpus"), source("pci", s))) for s in states)
    assert changes(before, starting) == changes(starting, well) == []
    assert [c.words for c in changes(starting, failing)] == ["source pci failing"]


def test_that_no_device_events_arrive_is_told_with_the_reason():
    deaf = source("uevents", SourceState.ABSENT, 0, "none in this namespace", vital=False)
    (_, *told) = changes(None, report(device("cpu-node0"), sources=(deaf,)))
    assert [c.words for c in told if c.subject == "source uevents"] == [
        "source uevents absent none in this namespace"
    ]


def test_a_line_stays_one_line():
    (change,) = changes(None, report(device("gpu-0", severity=Severity.UNHEALTHY, message="a\nb\x1b[2J")))
    assert str(change).isprintable()


def test_a_fault_of_a_gpu_and_all_its_instances_is_one_line_that_says_which_gpu_it_is():
    well = report(gpu(1), *(instance(n, 1) for n in range(7)))
    (change,) = changes(well, report(gpu(1, LOST), *(instance(n, 1, LOST) for n in range(7))))
    assert change.subject == "gpu-1"
    assert change.words == (
        "gpu-1 Unhealthy gpu.lost: NVML answers 15, the GPU is lost (and its 7 instances; "
        "NVIDIA A100-SXM4-40GB, GPU-00000001, 0000:1c:00.0, serial 1650001)"
    )


def test_an_instance_that_is_worse_off_than_its_gpu_has_a_line_of_its_own():
    before, now = report(gpu(1), instance(1, 1)), report(gpu(1, LOST), instance(1, 1, LOST, CONTAINED))
    assert [change.subject for change in changes(before, now)] == ["gpu-1", "gpu-1-mig-1-0"]
    (change,) = changes(report(gpu(1), instance(1, 1)), report(gpu(1), instance(1, 1, CONTAINED)))
    assert change.subject == "gpu-1-mig-1-0"


def test_the_first_report_has_a_line_per_gpu_that_is_well():
    lines = [change.words for change in changes(None, GPUS)]
    assert lines[0] == "gpu-0 Healthy (and its 7 instances)"
    names = ["gpu-0", "gpu-1", "gpu-2", "gpu-2-mig-1-0", "gpu-2-mig-2-0", "gpu-3"]
    assert [line.split()[0] for line in lines] == names
    assert lines[2] == "gpu-2 Healthy (and 1 of its 3 instances)"


def test_instances_that_are_gone_are_told_and_with_their_gpu_at_once():
    whole, parted = report(gpu(1)), report(gpu(1), instance(1, 1), instance(2, 1))
    assert [c.words for c in changes(parted, whole)] == [
        f"gpu-1-mig-{n}-0 gone no longer reported" for n in (1, 2)
    ]
    (change,) = changes(replace(parted, devices=(gpu(0), *parted.devices)), report(gpu(0)))
    assert change.words == "gpu-1 gone no longer reported (and its 2 instances)"


def test_which_gpu_it_is_is_no_news():
    plain = gpu(1, LOST)._replace(attributes=())
    assert changes(report(plain), report(gpu(1, LOST))) == []
    assert changes(report(gpu(1)), report(gpu(1, FAULT)))[0].aside == ""


def test_a_node_without_gpus_says_nothing_of_what_it_would_read_them_with():
    absent = source("nvml", SourceState.ABSENT, 0, "no libnvidia-ml.so.1", vital=False)
    assert [c.subject for c in changes(None, report(device("cpu-node0"), sources=(absent,)))] == ["cpu-node0"]
    back = report(device("cpu-node0"), sources=(absent._replace(state=SourceState.OK),))
    assert [c.words for c in changes(back, report(device("cpu-node0"), sources=(absent,)))] == [
        "source nvml absent"
    ]


# --- the log -----------------------------------------------------------------------------------------------


def written(level: int, text: str, *, journal: bool, error: BaseException | None = None) -> str:
    info = (type(error), error, error.__traceback__) if error else None
    record = logging.LogRecord("agent.x", level, __file__, 1, "%s", (text,), info)
    record.created = 1_795_255_444.9
    return LineFormatter(journal=journal).format(record)


def test_for_people_a_line_has_time_and_level():
    assert written(logging.INFO, "hello", journal=False) == "2026-11-21T10:04:04Z info hello"


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 2)],
)
def test_for_the_journal_a_line_has_its_priority_and_no_time(level, priority):
    assert written(level, "hello", journal=True) == f"<{priority}>hello"
    assert {number for _, number in PRIORITIES} == {2, 3, 4, 6, 7}


def test_every_line_of_a_traceback_has_the_priority():
    lines = written(logging.ERROR, "hello", journal=True, error=ValueError("a\nb")).splitlines()
    assert lines == ["<3>hello", "<3>ValueError: a", "<3>b"]


def test_every_severity_has_a_level_and_worse_is_not_quieter():
    levels = [LEVEL_OF_SEVERITY[severity] for severity in Severity]
    assert levels == sorted(levels)


def test_the_journal_is_known_by_its_device_and_inode(tmp_path):
    with (tmp_path / "log").open("w") as stream:
        stat = os.fstat(stream.fileno())
        assert is_journal(stream, {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"})
        assert not is_journal(stream, {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino + 1}"})
        assert not is_journal(stream, {})
    assert not is_journal(io.StringIO(), {"JOURNAL_STREAM": "1:2"})


def test_a_fault_that_harms_nothing_is_told_with_its_cause():
    (change,) = changes(report(gpu(0)), report(gpu(0, FAULT)))
    assert (change.words, change.severity) == ("gpu-0 Healthy gpu.xid.31: 1 time", Severity.INFO)


def test_a_gpus_own_source_has_no_line_beside_the_gpus():
    before = report(gpu(0), sources=(source("gpu-0"), source("nvml")))
    fails = (source("gpu-0", SourceState.FAILING, 1, "NVML answers 15"), source("nvml"))
    lines = [change.words for change in changes(before, report(gpu(0, LOST), sources=fails))]
    assert [line.split()[0] for line in lines] == ["gpu-0"]


def test_a_source_that_no_device_speaks_for_has_its_line():
    before = report(gpu(0), sources=(source("gpu-1"),))
    fails = (source("gpu-1", SourceState.FAILING, 1, "NVML answers 3"),)
    assert [change.subject for change in changes(before, report(gpu(0), sources=fails))] == ["source gpu-1"]


def test_a_warning_of_several_lines_has_its_priority_on_each():
    text = "a.py:1: UserWarning: hello\n  warn()\n"
    lines = ["<4>a.py:1: UserWarning: hello", "<4>  warn()"]
    assert written(logging.WARNING, text, journal=True).splitlines() == lines


def test_last_words_are_errors_to_the_journal_and_to_people_what_they_are():
    text = "Traceback\nValueError"
    assert LineFormatter(journal=True).last_words(text) == "<3>Traceback\n<3>ValueError"
    assert LineFormatter(journal=False).last_words(text) == text

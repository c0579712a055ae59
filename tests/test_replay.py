"""``drahealth replay`` and ``what-if``: records of a real agent and of simulated nodes, evaluated again."""

import atexit
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
from agents import run_command, short_tmp
from golden import values
from hypothesis import given, settings
from hypothesis import strategies as st
from paper import group_sample
from patience import PATIENCE_S
from record_nodes import RecordedGpuNode, RecordedHost, Step, gpu_day, host_day
from test_cli_e2e import AGENT, Node, line_with, start_process
from test_record import write_segment

from agent.cli import replay, what_if
from agent.cli.main import main
from agent.engine.step import EngineState, StepOutcome
from agent.health.kernel_log.facts import KernelLogCode
from agent.health.kernel_log.parse import HostLogLine, parse_host_line
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.health import Severity
from agent.model.machine_samples import LogLine
from agent.model.pod_findings import PodFinding, PodsSample
from agent.model.reading import SourceSample, SourceState
from agent.model.settings import CustomCheck, EngineSettings, RuleOverride
from agent.model.time import NS, Instant
from agent.record.events import DeviceVerdict, RecordedStep, SegmentHead, recorded_verdicts
from agent.record.redaction import Redactor
from agent.record.segment_file import SegmentReader, SegmentWriter, _frames, segment_path, segment_paths
from agent.record.what_if import (
    ChangeKind,
    FaultInterval,
    HealthIntervals,
    Incident,
    compare_record,
    median_interval,
    score_rules,
    success_rate,
)

__all__ = ["short_tmp"]


@pytest.fixture
def day(tmp_path: Path) -> Path:
    """Record of a day of GPUs, in two segments that follow each other."""
    steps = gpu_day(3, 16)
    half = len(steps) // 2
    directory = tmp_path / "record"
    directory.mkdir()
    write_segment(segment_path(directory, 1), steps[:half])
    write_segment(segment_path(directory, 2), steps[half:])
    return directory


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    code = main([*map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


# --- a real agent -------------------------------------------------------------------------------------------


@pytest.mark.live
def test_replay_of_an_agents_record_repeats_the_watched_reports(short_tmp: Path) -> None:
    node = Node(short_tmp)
    record = short_tmp / "record"
    config = short_tmp / "drahealth.toml"
    config.write_text('[stream]\nlease = "3s"\nheartbeat = "200ms"\n')
    command = [*node.run_args(), "--record-dir", str(record), "--config", str(config)]
    watched: list[str] = []
    with start_process(*command, stream="stderr") as process:
        line_with(process.stderr, "hugepages-2mi-node0 Healthy")
        watch = [*AGENT, "watch", "-o", "json", "--runtime-dir", str(node.runtime_dir)]
        with start_process(*watch) as follower:
            watched.append(follower.stdout.readline())
            for pages in (5, 8, 6):
                node.resize(pages)
                word = "Unhealthy" if pages < 8 else "Healthy"
                drain = threading.Thread(target=line_with, args=(process.stderr, f"node0 {word}"))
                drain.start()
                drain.join(PATIENCE_S)
                watched += [follower.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    done = run_command("replay", str(record), "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    replayed = iter(done.stdout.splitlines(keepends=True))
    assert len(watched) == 7
    for line in watched:
        assert line in replayed, "a watched report is missing in the replay, or out of order"
    table = run_command("replay", str(record))
    assert "hugepages-2mi-node0 Unhealthy" in table.stdout


@pytest.mark.live
def test_reload_begins_and_ends_the_record_of_a_running_agent(short_tmp: Path) -> None:
    node = Node(short_tmp)
    record, config = short_tmp / "record", short_tmp / "drahealth.toml"
    config.write_text("")
    with start_process(*node.run_args(), "--config", str(config), stream="stderr") as process:
        line_with(process.stderr, "hugepages-2mi-node0 Healthy")
        config.write_text(f'[record]\ndir = "{record}"\n')
        process.send_signal(signal.SIGHUP)
        line_with(process.stderr, "configuration: reloaded: record.dir")
        node.resize(5)
        line_with(process.stderr, "node0 Unhealthy")
        config.write_text("")
        process.send_signal(signal.SIGHUP)
        line_with(process.stderr, "configuration: reloaded: record.dir")
        node.resize(8)
        line_with(process.stderr, "node0 Healthy")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    done = run_command("replay", str(record))
    assert (done.returncode, done.stderr) == (0, "")
    changes = [line for line in done.stdout.splitlines() if " hugepages-2mi-node0 " in line]
    assert changes[-1].split()[2] == "Unhealthy", done.stdout


@pytest.mark.live
def test_agent_without_zstandard_refuses_to_record(short_tmp: Path) -> None:
    program = (
        "import sys; sys.modules['zstandard'] = None; from agent.cli.main import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    node = Node(short_tmp)
    arguments = [*node.run_args()[3:], "--record-dir", str(short_tmp / "record")]
    done = subprocess.run(
        [AGENT[0], "-c", program, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 78
    assert "install drahealth[record]" in done.stderr


# --- replay -------------------------------------------------------------------------------------------------


def test_replay_prints_changes_and_finds_no_difference(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "replay", day)
    assert (code, err) == (0, "")
    assert "gpu-0 Healthy" in out
    assert "Unhealthy" in out
    assert run(capsys, "replay", *segment_paths(day))[1] == out


def test_replay_until_a_time_prints_the_report_of_then(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "replay", day, "-o", "json")
    documents = [json.loads(line) for line in out.splitlines()]
    middle = documents[len(documents) // 3]["at"]
    _, out, _ = run(capsys, "replay", day, "-o", "json", "--until", middle)
    assert documents[0] == json.loads(out.splitlines()[0])
    assert json.loads(out.splitlines()[-1])["at"] <= middle
    code, out, _ = run(capsys, "replay", day, "-o", "report", "--until", middle)
    assert code == 0
    assert "gpu-2" in out


def test_replay_with_speed_prints_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_segment(segment_path(tmp_path, 1), host_day(1, 3))
    _, fast, _ = run(capsys, "replay", tmp_path)
    assert run(capsys, "replay", tmp_path, "--speed", "100000") == (0, fast, "")


@pytest.mark.parametrize(
    ("before", "now", "is_same_boot", "pause_s"),
    [
        (Instant(5 * NS, 100.0), Instant(15 * NS, 110.0), True, 10.0),
        (Instant(5 * NS, 100.0), Instant(15 * NS, 7000.0), True, 10.0),  # the wall clock was set
        (Instant(1000 * NS, 100.0), Instant(5 * NS, 130.0), False, 30.0),
        (Instant(1000 * NS, 100.0), Instant(5 * NS, 130.0), True, 30.0),  # a boot of an unknown id
        (Instant(5 * NS, 100.0), Instant(90_000 * NS, 200_000.0), False, 60.0),
        (Instant(1000 * NS, 100.0), Instant(5 * NS, 50.0), False, 0.0),
    ],
)
def test_pause_between_reports_over_a_reboot_is_the_wall_time(
    before: Instant, now: Instant, is_same_boot: bool, pause_s: float
) -> None:
    assert replay._pause_s(before, now, is_same_boot=is_same_boot) == pause_s


def test_replay_with_speed_goes_on_after_a_reboot(
    day: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = gpu_day(3, 16)
    later = [
        (state, snapshot, replace(report, at=Instant(report.at.mono_ns + 90_000 * NS, report.at.wall_s)), use)
        for state, snapshot, report, use in steps
    ]
    path = segment_path(day, 3)
    writer = SegmentWriter(path, SegmentHead("0.2.0", "node-a", "boot-2"), steps[0][0])
    writer.append([evaluation_with(step) for step in later])
    writer.close()
    sleeps: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(sleeps), sleep=sleeps.append)
    monkeypatch.setattr(replay, "time", clock)
    run(capsys, "replay", day, "--speed", "2")
    published = [report.at.wall_s for _, _, report, use in steps if use is StepOutcome.PUBLISHED]
    assert sum(sleeps) == pytest.approx(published[-1] - published[0])  # twice, at twice the speed


def test_replay_with_the_lowest_speed_waits_without_an_error(
    day: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr(replay, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleeps.append))
    run(capsys, "replay", day, "--speed", "1e-300")
    assert 0 < max(sleeps) < 2**63 / NS


def test_last_report_of_a_damaged_record_names_the_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, *_ = gpu_day(3, 1)[0]
    path = tmp_path / "record-00000001.drahrec"
    SegmentWriter(path, SegmentHead("0.2.0", "node-a", "boot-1"), state).close()
    path.write_bytes(path.read_bytes() + b"torn")
    code, out, err = run(capsys, "replay", path, "-o", "report")
    assert (code, out) == (70, "")
    assert "not readable from byte" in err
    assert "no published report" in err


def test_replay_with_a_config_has_its_verdicts(
    day: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "other.toml"
    config.write_text('[[rules]]\ncode = "gpu.*"\noff = true\n')
    code, out, err = run(capsys, "replay", day, "--config", config)
    assert (code, err) == (0, "")
    assert "gpu.xid" not in out


def test_verdict_that_differs_from_the_recorded_one_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = gpu_day(3, 4)
    head = SegmentHead("0.0.9", "node-a", "")
    writer = SegmentWriter(segment_path(tmp_path, 1), head, steps[0][0])
    for _, snapshot, report, use in steps:  # as another release would have decided
        verdicts = [
            verdict._replace(severity=2, causes=(("gpu.old", 2),)) if verdict.subject == "gpu-1" else verdict
            for verdict in recorded_verdicts(report)
        ]
        writer.append([RecordedStep(snapshot, report.at, use, tuple(verdicts), report.is_full)])
    writer.close()
    code, _, err = run(capsys, "replay", tmp_path)
    assert code == 1
    assert "gpu-1: recorded Healthy (gpu.old), replayed Healthy" in err
    assert "this release decides differently in 1 case on 1 device" in err


def test_damaged_segment_is_named_and_the_rest_is_replayed(
    day: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = segment_path(day, 1)
    path.write_bytes(path.read_bytes()[:-5])
    code, out, err = run(capsys, "replay", day)
    assert code == 0
    assert "not readable from byte" in err
    assert out


@pytest.mark.parametrize(
    "verb", [["replay"], ["replay", "-o", "report"], ["record", "--to"], ["what-if", "--config"]]
)
def test_problem_of_a_record_has_no_escape_sequence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    state, *_ = gpu_day(3, 1)[0]
    record = tmp_path / "day\x1b[31m"
    record.mkdir()
    path = segment_path(record, 1)
    SegmentWriter(path, SegmentHead("0.2.0", "node-a", "boot-1"), state).close()
    path.write_bytes(path.read_bytes() + b"torn")
    (tmp_path / "empty.toml").touch()
    value = {"--to": [tmp_path / "copy"], "--config": [tmp_path / "empty.toml"]}.get(verb[-1], [])
    _, out, err = run(capsys, *verb, *value, record)
    assert "not readable from byte" in err
    assert "\x1b" not in out + err


def evaluation_with(step: Step, **changes: Any) -> RecordedStep:
    _, snapshot, report, use = step
    recorded = RecordedStep(snapshot, report.at, use, recorded_verdicts(report), report.is_full)
    return recorded._replace(**changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda step: {"snapshot": replace(step.snapshot, sources=(5,))},
            "AttributeError: 'int' object has no",
        ),
        (lambda step: {"now": Instant(step.now.mono_ns, 1e300)}, "the invalid time 1e+300 s"),
        (lambda step: {"now": Instant(-5, step.now.wall_s)}, "the invalid time 1.7e+09 s, -5 ns"),
        (
            lambda step: {"verdicts": (DeviceVerdict("gpu-0", 9, 0, ()),)},
            "Invalid enum value 9",
        ),
    ],
    ids=["source", "wall time", "monotonic time", "verdict"],
)
def test_evaluation_with_an_invalid_value_is_named_and_ends_its_segment(
    change: Any, reason: str, day: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = segment_path(day, 1)
    steps = gpu_day(3, 16)
    writer = SegmentWriter(path.with_name("bad"), SegmentHead("0.2.0", "node-a", "boot-1"), steps[0][0])
    bad = evaluation_with(steps[1])
    writer.append([evaluation_with(steps[0]), bad._replace(**change(bad)), evaluation_with(steps[2])])
    writer.close()
    path.with_name("bad").rename(path)
    _, out, err = run(capsys, "replay", day)
    assert f"{path}: not usable from evaluation 2 on: " in err
    assert reason in err
    assert out.count("gpu-1 ") > 1  # of the next segment
    config = tmp_path / "other.toml"
    config.write_text("")
    code, out, err = run(capsys, "what-if", day, "--config", config, "--jobs", "1")
    assert (code, err.count("\n")) == (0, 1)
    assert f"{path}: not usable from evaluation 2 on: " in err


def test_record_with_an_invalid_head_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = SegmentHead("0.2.0", 5, "boot-1")  # type: ignore[arg-type]
    SegmentWriter(segment_path(tmp_path, 1), head, EngineState(EngineSettings("node-a"))).close()
    code, _, err = run(capsys, "replay", tmp_path)
    assert code == 70
    assert "Expected `str`, got `int`" in err


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["/nowhere"], 70, "No such file"),
        (["/proc"], 70, "no segment file"),
        (["{day}", "--until", "noon"], 64, "'noon' is not a time"),
        (["{day}", "--until", "9999-12-31T23:59:59-14:00"], 64, "'9999-12-31T23:59:59-14:00' is not a time"),
        (["{day}", "--speed", "0"], 64, "0 is not above 0 and below 1e9"),
        (["{day}", "-o", "report", "--until", "1970-01-02T00:00:00Z"], 70, "no published report"),
    ],
)
def test_invalid_replay_is_refused(
    args: list[str], code: int, text: str, day: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, err = run(capsys, "replay", *(arg.format(day=day) for arg in args))
    assert found == code
    assert text in err


# --- what-if ------------------------------------------------------------------------------------------------

LIMITED = (
    "cgroup.cpu.throttled",
    "cpu.throttled.core",
    "gpu.ecc.correctable_rate",
    "gpu.pcie.replay",
    "mem.ecc.correctable_rate",
    "node.pressure.io",
)


def causes_of(side: Any) -> dict[Any, Any]:
    return {key: intervals for key, intervals in side.causes.items() if intervals}


@cache
def recorded_day(day: Any, seed: int) -> Path:
    """Record of a random day, kept for the tests of this process."""
    path = Path(mkdtemp(prefix="dh-day-")) / "record-00000001.drahrec"
    atexit.register(rmtree, path.parent)
    write_segment(path, day(seed, 12))
    return path


@given(
    day=st.sampled_from([host_day, gpu_day]),
    seed=st.integers(0, 2),
    code=st.sampled_from(LIMITED),
    limit=st.sampled_from([1, 3, 100, 1_000_000]),
)
@settings(max_examples=10, deadline=None)
def test_changed_limit_of_a_rule_changes_only_its_verdicts(
    day: Any, seed: int, code: str, limit: int
) -> None:
    path = recorded_day(day, seed)
    same = compare_record([path], lambda recorded: recorded)
    assert not list(same.changes())
    override = RuleOverride(code, limit=limit)
    other = compare_record([path], lambda recorded: replace(recorded, rules=(*recorded.rules, override)))
    assert {change.code for change in other.changes()} <= {code}


@pytest.mark.parametrize("day", [host_day, gpu_day])
def test_rule_that_is_off_makes_only_its_verdicts_vanish(day: Any) -> None:
    path = recorded_day(day, 1)
    same = compare_record([path], lambda recorded: recorded)
    codes = {code for _, code in causes_of(same.recorded) if code != "source.stalled"}
    assert codes
    for code in sorted(codes)[:6]:
        rule = RuleOverride(code, off=True)
        found = compare_record([path], lambda recorded, rule=rule: replace(recorded, rules=(rule,)))
        changes = list(found.changes())
        # a GPU that hangs is reported as a stalled source where no rule of its own reports it
        assert {change.code for change in changes} <= {code, "source.stalled"}
        assert {change.kind for change in changes if change.code == code} <= {ChangeKind.VANISHES}


@pytest.mark.parametrize(
    ("mono_s", "wall_s"), [(0, -1500), (2000, -1000)], ids=["clock set", "another boot of an unknown id"]
)
def test_intervals_follow_the_wall_clock_of_a_record(tmp_path: Path, mono_s: int, wall_s: int) -> None:
    steps = gpu_day(3, 16)
    (tmp_path / "exact").mkdir()
    write_segment(segment_path(tmp_path / "exact", 1), steps)
    expected = compare_record(segment_paths(tmp_path / "exact"), lambda recorded: recorded).recorded.unhealthy
    assert expected
    state, snapshot, report, use = steps[0]
    before = Instant(report.at.mono_ns + mono_s * NS, report.at.wall_s + wall_s)
    write_segment(segment_path(tmp_path, 1), [(state, snapshot, replace(report, at=before), use)])
    write_segment(segment_path(tmp_path, 2), steps[1:])
    found = compare_record(segment_paths(tmp_path), lambda recorded: recorded).recorded.unhealthy
    assert found == expected


def test_what_if_prints_changes_pods_and_scores(
    day: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "other.toml"
    config.write_text('[[rules]]\ncode = "gpu.lost"\noff = true\n')
    labels = tmp_path / "incidents.toml"
    labels.write_text(
        '[[incident]]\ndevice = "gpu-0"\nbegin = 2023-11-14T22:17:00Z\nend = 2023-11-14T23:00:00Z\n'
        'codes = ["gpu.lost"]\n'
        '[[incident]]\ndevice = "gpu-9"\nbegin = 2023-11-14T22:17:00Z\nend = 2023-11-14T23:00:00Z\n'
        'codes = ["gpu.lost"]\n'
    )
    args = ("what-if", day, "--config", config, "--labels", labels, "--jobs", "1")
    code, out, err = run(capsys, *args)
    assert (code, err) == (0, "")
    assert "vanishes" in out
    assert "Unhealthy device-hours:" in out
    assert "node-days a minute" in out
    code, out, _ = run(capsys, *args, "-o", "json")
    document = json.loads(out)
    assert {change["code"] for change in document["changes"]} == {"gpu.lost"}
    (rule,) = [score for score in document["scores"]["recorded"] if score["code"] == "gpu.lost"]
    assert (rule["recall"]["successes"], rule["recall"]["trials"]) == (1, 2)
    assert 0 < rule["recall"]["low"] < 0.5 < rule["recall"]["high"] < 1
    assert rule["secondsToDetect"][0] >= 0
    (rule,) = [score for score in document["scores"]["other"] if score["code"] == "gpu.lost"]
    assert (rule["recall"]["successes"], rule["recall"]["trials"]) == (0, 2)


def test_what_if_counts_pods_with_unhealthy_devices_by_driver_and_pool(tmp_path: Path) -> None:
    node = RecordedGpuNode(2)
    node.state = replace(node.state, settings=replace(node.settings, drivers=("gpu.example.com",)))
    node.steps.clear()  # of other settings
    uses = {
        "hurt": (DeviceRef("gpu.example.com", "node-a", "gpu-0"),),
        "healthy": (DeviceRef("gpu.example.com", "node-a", "gpu-1"),),
        "other-driver": (DeviceRef("nic.example.com", "node-a", "gpu-0"),),
        "other-pool": (DeviceRef("gpu.example.com", "rack", "gpu-0"),),
    }
    source = SourceSample("pods", SourceState("ok"), node.now_ns, 60 * NS, 0, "", 1, False)
    node.pods = PodsSample(source, uses, {uid: f"team/{uid}" for uid in uses}, ())
    node.next(3)
    node.lose(0)
    node.next(5)
    write_segment(segment_path(tmp_path, 1), node.steps)
    found = compare_record(segment_paths(tmp_path), lambda recorded: recorded)
    assert found.recorded.unhealthy.keys() == {"gpu-0"}
    assert found.recorded.pods == found.other.pods == {"team/hurt"}


def test_severity_that_changes_at_another_time_is_a_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = RecordedGpuNode(2)
    node.next(5)
    node.hang(0)
    node.next(200)
    node.return_from_hang(0)
    node.next(100)
    write_segment(segment_path(tmp_path, 1), node.steps)
    config = tmp_path / "other.toml"
    config.write_text('[gpu]\ndead = "20s"\n')
    _, out, _ = run(capsys, "what-if", tmp_path, "--config", config)
    assert re.search(r"gpu\.not_answering +severity .*, unhealthy after 55 s .*, unhealthy after 15 s", out)
    _, out, _ = run(capsys, "what-if", tmp_path, "--config", config, "-o", "json")
    (change,) = json.loads(out)["changes"]
    assert change["kind"] == "severity"
    assert [change_["severity"] for change_ in change["other"]["severityChanges"]] == ["unhealthy"]
    config.write_text("")
    assert "no verdict changes" in run(capsys, "what-if", tmp_path, "--config", config)[1]


@pytest.mark.live
def test_what_if_of_two_nodes_is_the_same_with_two_processes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        write_segment(segment_path(tmp_path / name, 1), host_day(seed, 5))
    damaged = tmp_path / "c" / "record-00000001.drahrec"
    damaged.parent.mkdir()
    damaged.write_bytes(b"nothing")
    config = tmp_path / "other.toml"
    config.write_text("[errors]\ncorrectable = 1\n")
    places = [str(tmp_path / name) for name in "abc"]
    documents = []
    for jobs in "12":
        done = run_command("what-if", *places, "--config", str(config), "--jobs", jobs, "-o", "json")
        assert done.returncode == 0, done.stderr
        assert f"{damaged}: the file is not a drahealth record" in done.stderr
        document = json.loads(done.stdout)
        del document["elapsedSeconds"]
        documents.append(document)
    assert documents[0]["apiVersion"] == "drahealth/v1"
    assert documents[0] == documents[1]
    assert len(documents[0]["records"]) == 3


def test_what_if_leaves_out_a_record_without_a_segment(
    day: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "other.toml"
    config.write_text("")
    (tmp_path / "empty").mkdir()
    code, out, err = run(capsys, "what-if", tmp_path / "empty", day, "--config", config, "--jobs", "1")
    assert (code, err.count("\n")) == (0, 1)
    assert f"record {tmp_path}/empty: the directory has no segment file" in err
    assert "1 record," in out
    code, out, err = run(capsys, "what-if", tmp_path / "empty", "--config", config)
    assert (code, out) == (70, "")
    assert "no evaluation of 1 record can be read" in err


def unless_other(settings: EngineSettings) -> EngineSettings:
    """Return the settings of a node; fail for the node ``other``."""
    if settings.node == "other":
        raise RuntimeError("no settings")
    return settings


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_if_leaves_out_a_record_whose_comparison_fails(day: Path, tmp_path: Path, jobs: int) -> None:
    other = tmp_path / "other" / "record-00000001.drahrec"
    other.parent.mkdir()
    host = RecordedHost(EngineSettings("other"))
    host.evaluate()
    write_segment(other, host.steps)
    failed, compared = what_if._compare_all([[other], segment_paths(day)], unless_other, jobs)
    assert failed.problems == [f"record {other}: left out: RuntimeError: no settings"]
    assert (failed.steps, compared.problems) == (0, [])
    assert compared.steps


def test_what_if_names_lost_snapshots_and_segments_of_two_nodes(day: Path) -> None:
    first, last = segment_paths(day)
    reader, copy = SegmentReader(last), segment_path(day, 3)
    writer = SegmentWriter(copy, reader.head._replace(node="other", lost=3), reader.state()[0])
    writer.append([*reader.steps()])
    writer.close()
    last.unlink()
    found = compare_record([first, copy], lambda settings: settings)
    assert found.problems == [
        f"{copy}: 3 snapshots right before it were not recorded",
        f"{copy}: is of node other, compared as node node-a",
    ]


def test_record_that_is_named_twice_is_compared_once(
    day: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "other.toml"
    config.write_text("")
    (tmp_path / "link").symlink_to(day)
    monkeypatch.chdir(tmp_path)
    names = (day, "record", "link", segment_path(Path("record"), 1))
    code, out, err = run(capsys, "what-if", *names, "--config", config, "--jobs", "1", "-o", "json")
    assert (code, err) == (0, "")
    (record,) = json.loads(out)["records"]
    assert record["evaluations"] == len(gpu_day(3, 16))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval_has_the_published_values(
    successes: int, trials: int, low: float, high: float
) -> None:
    share = success_rate(successes, trials)
    assert (share.low, share.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_cause_that_is_no_longer_info_is_a_report() -> None:
    side = HealthIntervals()
    for at_s, severity in enumerate((Severity.INFO, Severity.DEGRADED, Severity.UNHEALTHY, Severity.INFO)):
        side.observe(float(at_s), (DeviceVerdict("gpu-0", 0, severity, (("xid.13", severity),)),), None)
    side.close(9.0)
    assert side.causes["gpu-0", "xid.13"] == [
        FaultInterval(0.0, 1.0, Severity.INFO),
        FaultInterval(1.0, 3.0, Severity.DEGRADED, ((2.0, Severity.UNHEALTHY),)),
        FaultInterval(3.0, 9.0, Severity.INFO),
    ]
    score = score_rules([("node-a", side)], [Incident("gpu-0", 0.0, 9.0)])[0]
    assert (score.precision.successes, score.precision.trials, score.recall.successes) == (1, 1, 1)
    assert score.delay_s == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("pattern", ["gpu.xid.*", "gpu.xid.7?", "gpu.xid.[78]9"])
def test_pattern_of_codes_has_no_score_of_its_own(pattern: str) -> None:
    side = HealthIntervals(causes={("gpu-0", "gpu.xid.79"): [FaultInterval(10.0, 20.0)]})
    scores = score_rules([("node-a", side)], [Incident("gpu-0", 5.0, 30.0, codes=(pattern,))])
    assert [score.code for score in scores] == ["*", "gpu.xid.79"]
    assert (scores[1].recall.successes, scores[1].recall.trials) == (1, 1)


def test_late_heartbeats_of_a_minute_leave_one_interval(tmp_path: Path) -> None:
    node = RecordedGpuNode(1)
    node.next(3)
    node.lose(0)
    node.next(5)
    for _ in range(3):
        node.wait(62.0)
        node.next()
    write_segment(segment_path(tmp_path, 1), node.steps)
    found = compare_record(segment_paths(tmp_path), lambda recorded: recorded)
    assert len(found.recorded.causes["gpu-0", "gpu.lost"]) == 1
    assert found.observed_s > 180


def test_interval_of_a_median_covers_95_percent() -> None:
    assert median_interval([]) is None
    assert median_interval([3.0]) == (3.0, 3.0, 3.0)
    assert median_interval(range(1, 7)) == (3.5, 1, 6)  # 1 - 2 / 2**6 = 97 %
    assert median_interval(range(1, 11)) == (5.5, 2, 9)  # 97.9 %


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1", r"must have entries \[\[incident\]\]"),
        ('[[incident]]\ndevice = "a"', "needs the keys device, begin and end"),
        ('[[incident]]\ndevice = "a"\nbegin = 2026-01-01\nend = 2026-01-02', "is not a time with a zone"),
        (
            '[[incident]]\ndevice = "a"\nbegin = 2026-01-02T00:00:00Z\nend = 2026-01-01T00:00:00Z',
            "end is before its begin",
        ),
        (
            '[[incident]]\ndevice = "a"\nbegin = 2026-01-02T00:00:00Z\nend = 2026-01-02T00:00:00Z\ncodes = 1',
            "codes",
        ),
        ("[", "Invalid initial character"),
    ],
)
def test_invalid_labels_are_refused(
    text: str, error: str, day: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.toml").write_text("")
    (tmp_path / "labels.toml").write_text(text)
    code, _, err = run(
        capsys, "what-if", day, "--config", tmp_path / "other.toml", "--labels", tmp_path / "labels.toml"
    )
    assert code == 78
    assert re.search(error, err)


def test_segment_in_a_pipe_is_replayed(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = segment_path(day, 1)
    with subprocess.Popen(["cat", segment], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        found = run(capsys, "replay", f"/dev/fd/{cat.stdout.fileno()}")
    assert found == run(capsys, "replay", segment)


def test_pipe_without_a_writer_is_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.system.files.WRITER_S", 0.0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    problem = "cannot be read: no process wrote to this pipe within 0 s; start its writer"
    assert run(capsys, "replay", pipe) == (70, "", f"drahealth: record file {pipe}: {problem}\n")


def test_labels_without_end_are_refused(
    day: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.toml").write_text("")
    code, _, err = run(capsys, "what-if", day, "--config", tmp_path / "other.toml", "--labels", "/dev/zero")
    assert (code, err) == (
        78,
        "drahealth: incident file /dev/zero: cannot be read: is not a regular file\n",
    )


# --- copies -------------------------------------------------------------------------------------------------

FOREIGN = "7b5f1c9e-0c0d-4a53-9a64-0b9bd5b3a1f0"
POD_IN_PATH = values.POD.replace("-", "_")
CONTAINER = "4f" * 32
SECRET = (
    *("node-a", "team-a", "train-0", values.POD, "GPU-00000001", "serial-1", FOREIGN),
    *(POD_IN_PATH, CONTAINER),
)


def secret_day() -> list[Step]:
    """Return steps with names of pods, a claim, a node, serial numbers and UUIDs, also in texts."""
    node = RecordedGpuNode(2)
    for number in (0, 1):
        node.change(number, serial=f"serial-{number}")
    node.groups = [group_sample(7, pod=values.POD, container="main")]
    node.pods = PodsSample(
        SourceSample("pods", SourceState("ok"), node.now_ns, 60 * NS, 0, "", 1, False),
        {values.POD: (DeviceRef("gpu.example.com", "node-a", "gpu-0"),)},
        {values.POD: "team-a/train-0"},
        (PodFinding(values.POD, "main", "cgroup.lower", "4000m of train-0, 9000m expected"),),
    )
    node.next(3)
    path = f"/kubepods-pod{POD_IN_PATH}.slice/cri-containerd-{CONTAINER}.scope"
    node.log(f"NVRM: Xid (PCI:0000:1b:00): 79, pid=7, name=train-0, {FOREIGN}, {path}")
    node.lose(1)
    node.next(5)
    return node.steps


def unpack_segments(directory: Path) -> bytes:
    paths = segment_paths(directory)
    return b"".join(str(event).encode() for path in paths for events in _frames(path) for event in events)


def test_redacted_copy_has_no_names_and_the_same_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = secret_day()
    (tmp_path / "record").mkdir()
    write_segment(segment_path(tmp_path / "record", 1), steps[:4])
    write_segment(segment_path(tmp_path / "record", 2), steps[4:])
    whole = unpack_segments(tmp_path / "record")
    assert all(secret.encode() in whole for secret in SECRET)
    code, out, err = run(capsys, "record", tmp_path / "record", "--to", tmp_path / "copy", "--redact")
    assert (code, err) == (0, "")
    assert "2 segments with" in out
    copy = unpack_segments(tmp_path / "copy")
    # a pseudonym of a node is node- and hexadecimal digits
    assert [
        secret for secret in SECRET if re.search(re.escape(secret.encode()) + rb"(?![0-9a-f])", copy)
    ] == []
    first, second = (SegmentReader(path).head for path in segment_paths(tmp_path / "copy"))
    assert first.is_redacted
    assert first.node == second.node
    assert re.fullmatch("node-[0-9a-f]{10}", first.node)
    code, out, err = run(capsys, "replay", tmp_path / "copy")
    assert (code, err) == (0, "")
    assert "gpu-1 Unhealthy gpu.lost" in out


def test_segment_in_a_pipe_is_copied_but_not_redacted(
    day: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["cat", segment_path(day, 1)], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        pipe = f"/dev/fd/{cat.stdout.fileno()}"
        code, out, err = run(capsys, "record", pipe, "--redact", "--to", tmp_path / "copy")
        reason = "is read twice, and is no regular file; copy it to one first"
        assert (code, out, err) == (64, "", f"drahealth: --redact: {pipe} {reason}\n")
        assert not (tmp_path / "copy").exists()
        assert run(capsys, "record", pipe, "--to", tmp_path / "copy")[0] == 0
    assert run(capsys, "replay", tmp_path / "copy") == run(capsys, "replay", segment_path(day, 1))


@pytest.mark.parametrize("name", ["edac", "fabric", "watchdog", "mlx5_core", "source.stalled"])
def test_redacted_copy_with_a_pod_named_like_a_source_keeps_the_verdicts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = CustomCheck(
        "fabric", ("/opt/check", "--token=s3cr3t", "--gpu={device}", "s3cr3t"), "gpu-*", user="hpc-admin"
    )
    host = RecordedHost(EngineSettings("node-a", checks=(check,)))
    source = SourceSample("pods", SourceState("ok"), host.now_ns, 60 * NS, 0, "", 1, False)
    host.pods = PodsSample(source, {values.POD: ()}, {values.POD: f"{name}/{name}"}, ())
    host.next(5)
    host.log("watchdog: BUG: soft lockup - CPU#0 stuck for 23s! [worker:1]")
    host.stuck |= {"edac"}
    host.next(12)
    (tmp_path / "record").mkdir()
    write_segment(segment_path(tmp_path / "record", 1), host.steps)
    _, original, _ = run(capsys, "replay", tmp_path / "record")
    assert "source edac stalled" in original
    run(capsys, "record", tmp_path / "record", "--to", tmp_path / "copy", "--redact")
    assert run(capsys, "replay", tmp_path / "copy") == (0, original, "")
    (path,) = segment_paths(tmp_path / "copy")
    state, _ = SegmentReader(path).state()
    assert [(*check.command, check.user) for check in state.settings.checks] == [
        ("/opt/check", "redacted", "{device}", "redacted", "redacted")
    ]
    assert b"s3cr3t" not in unpack_segments(tmp_path / "copy")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("refused for team-a/train-0.", "refused for NS/CLAIM."),
        ("node worker-7.", "node NODE."),
        ("host worker-7.dc1.example.com", "host NODE.dc1.example.com"),
        ("worker-7: team-a_, train-0-", "NODE: NS_, CLAIM-"),
        (
            "worker-70 worker-7-b train-0.x train-01 my-team-a",
            "worker-70 worker-7-b train-0.x train-01 my-team-a",
        ),
    ],
)
def test_name_before_a_sign_is_redacted_and_a_part_of_a_name_is_not(text: str, expected: str) -> None:
    redactor = Redactor(b"k")
    claim, device = ClaimRef("team-a", "train-0", "uid-1"), DeviceRef("d.example.com", "worker-7", "gpu-0")
    redactor.collect([claim, device])
    redacted = re.sub(r"\b(ns|claim|node)-[0-9a-f]{10}", lambda found: found[1].upper(), redactor.text(text))
    assert redacted == expected


@pytest.mark.parametrize(
    ("node", "text", "expected"),
    [
        ("worker-7.dc1.example.com", "worker-7.dc1.example.com: worker-7 answers", "NODE: NODE answers"),
        ("10.0.0.7", "10.0.0.7: 10 errors", "NODE: 10 errors"),
    ],
)
def test_host_name_of_a_node_with_a_domain_is_redacted(node: str, text: str, expected: str) -> None:
    redactor = Redactor(b"k")
    redactor.add_head(SegmentHead("0", node, "boot"))
    assert re.sub(r"\bnode-[0-9a-f]{10}", "NODE", redactor.text(text)) == expected


@pytest.mark.parametrize("server", ["files.corp.example", "10.0.0.7", "fd00::7"])
def test_nfs_server_is_redacted_and_its_line_is_parsed_as_before(server: str) -> None:
    redactor = Redactor(b"k")
    text = f"nfs: server {server} not responding, still trying"
    redactor.collect(LogLine(0, 1, 0, 0, text, text, 1))
    name = redactor.text(server)
    assert re.fullmatch("server-[0-9a-f]{10}", name)
    assert redactor.text(text) == text.replace(server, name)
    assert parse_host_line(redactor.text(text)) == HostLogLine(KernelLogCode.NFS, name, ("down",))


def test_redacted_copy_of_a_growing_record_has_no_later_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = secret_day()
    path = segment_path(tmp_path, 1)
    write_segment(path, [replace_pods(steps[0])])
    collect = Redactor.collect

    def collect_and_append(redactor: Redactor, value: Any) -> None:
        collect(redactor, value)
        if isinstance(value, RecordedStep):
            monkeypatch.undo()
            path.unlink()
            write_segment(path, [replace_pods(steps[0]), *steps[1:]], per_frame=1)

    monkeypatch.setattr(Redactor, "collect", collect_and_append)
    code, out, _ = run(capsys, "record", tmp_path, "--to", tmp_path / "copy", "--redact")
    assert code == 0
    assert "1 segment with 1 evaluation " in out
    assert b"train-0" not in unpack_segments(tmp_path / "copy")


def replace_pods(step: Step) -> Step:
    """Return a step whose pods were not read."""
    state, snapshot, report, use = step
    return state, replace(snapshot, pods=None), report, use


def test_segment_without_content_is_left_out(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = run(capsys, "replay", day, "-o", "json")
    segment_path(day, 3).touch()
    code, out, err = run(capsys, "replay", day, "-o", "json")
    assert (code, out) == expected[:2]
    assert "record-00000003.drahrec: the file is not a drahealth record" in err
    code, out, err = run(capsys, "record", day, "--to", day.parent / "copy")
    assert (code, out[:11]) == (0, "2 segments ")
    assert "record-00000003.drahrec: the file is not a drahealth record; it is not copied" in err
    for number in (1, 2):
        segment_path(day, number).write_bytes(b"")
    code, _, err = run(capsys, "replay", day)
    assert code == 70
    assert "none of the 3 record files can be read; the first one: " in err


def test_segment_with_an_unreadable_state_is_left_out_of_a_copy(
    day: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SegmentReader.state

    def read_state(reader: SegmentReader) -> tuple[EngineState, str]:
        is_first = reader.path == segment_path(day, 1)
        return read(reader)[0], "this release has no class Former" if is_first else ""

    monkeypatch.setattr(SegmentReader, "state", read_state)
    for options in [], ["--redact"]:
        code, out, err = run(capsys, "record", day, "--to", day.parent / f"copy{len(options)}", *options)
        assert (code, out[:10]) == (0, "1 segment ")
        assert err.count("its first state is unreadable: this release has no class Former; it is not") == 1
    segment_path(day, 2).unlink()
    code, _, err = run(capsys, "record", day, "--to", day.parent / "none")
    assert code == 70
    assert "its first state is unreadable" in err


def test_segment_deleted_during_a_redacted_copy_is_left_out(
    day: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = Redactor.collect

    def collect_and_delete(redactor: Redactor, value: Any) -> None:
        collect(redactor, value)
        if isinstance(value, RecordedStep):
            segment_path(day, 1).unlink(missing_ok=True)

    monkeypatch.setattr(Redactor, "collect", collect_and_delete)
    code, out, err = run(capsys, "record", day, "--to", day.parent / "copy", "--redact")
    assert (code, out[:10]) == (0, "1 segment ")
    assert "record-00000001.drahrec: cannot be read: No such file or directory; it is not copied" in err
    assert [path.name[7:15] for path in segment_paths(day.parent / "copy")] == ["00000001"]


def test_segment_deleted_during_a_replay_is_left_out(
    day: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SegmentReader.steps

    def read_and_delete(reader: SegmentReader) -> Iterator[RecordedStep]:
        segment_path(day, 2).unlink(missing_ok=True)
        return read(reader)

    monkeypatch.setattr(SegmentReader, "steps", read_and_delete)
    code, out, err = run(capsys, "replay", day)
    assert (code, bool(out)) == (0, True)
    assert "record-00000002.drahrec: cannot be read: No such file or directory" in err


def test_copies_into_one_directory_are_numbered_after_the_last_one(
    day: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = day.parent / "copy"
    for _ in range(2):
        assert run(capsys, "record", day, "--to", copy)[0] == 0
        segment_path(copy, 1).unlink(missing_ok=True)
    assert [path.name[7:15] for path in segment_paths(copy)] == ["00000002", "00000003", "00000004"]


def test_copy_without_redaction_is_the_same_record(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = run(capsys, "record", day, "--to", day.parent / "copy")
    assert code == 0
    assert unpack_segments(day.parent / "copy") == unpack_segments(day)
    replayed = run(capsys, "replay", day, "-o", "json")
    assert run(capsys, "replay", day.parent / "copy", "-o", "json") == replayed


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["{day}", "--to", "{day}"], 64, "is the directory of the record itself"),
        (
            ["--to", "{day}/x", "--config", "/dev/null"],
            78,
            "set the key and reload the agent, or name a record",
        ),
        (["{day}", "--to", "/dev/null/x"], 70, "/dev/null/x: cannot be written: Not a directory"),
    ],
)
def test_invalid_copy_is_refused(
    args: list[str], code: int, text: str, day: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, err = run(capsys, "record", *(arg.format(day=day) for arg in args))
    assert found == code
    assert text in err

"""``drahealth replay`` and ``what-if``: records of a real agent and of simulated nodes, evaluated again."""

import json
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from agents import short_tmp
from patience import PATIENCE_S
from record_nodes import gpu_day, host_day
from test_cli_e2e import AGENT, Node, cli, line_with, started
from test_record import write_segment

from agent.cli.main import main
from agent.record.events import RecordedStep, SegmentHead, report_verdicts
from agent.record.segment_file import SegmentWriter, segment_path, segment_paths

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


def test_replay_of_an_agents_record_repeats_the_watched_reports(short_tmp: Path) -> None:
    node = Node(short_tmp)
    record = short_tmp / "record"
    config = short_tmp / "drahealth.toml"
    config.write_text('[stream]\nlease = "3s"\nheartbeat = "200ms"\n')
    command = [*node.run_args(), "--record-dir", str(record), "--config", str(config)]
    watched: list[str] = []
    with started(*command, stream="stderr") as process:
        line_with(process.stderr, "hugepages-2mi-node0 Healthy")
        watch = [*AGENT, "watch", "-o", "json", "--runtime-dir", str(node.runtime_dir)]
        with started(*watch) as follower:
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
    done = cli("replay", str(record), "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    replayed = iter(done.stdout.splitlines(keepends=True))
    assert len(watched) == 7
    for line in watched:
        assert line in replayed, "a watched report is missing in the replay, or out of order"
    table = cli("replay", str(record))
    assert "hugepages-2mi-node0 Unhealthy" in table.stdout


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
            one._replace(severity=2, codes=("gpu.old",)) if one.subject == "gpu-1" else one
            for one in report_verdicts(report)
        ]
        writer.append([RecordedStep(snapshot, report.at, use, tuple(verdicts), report.is_full)])
    writer.close()
    code, _, err = run(capsys, "replay", tmp_path)
    assert code == 1
    assert "gpu-1: recorded Healthy (gpu.old), replayed Healthy" in err
    assert "this release decides otherwise in 1 case on 1 device" in err


def test_damaged_segment_is_named_and_the_rest_is_replayed(
    day: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = segment_path(day, 1)
    path.write_bytes(path.read_bytes()[:-5])
    code, out, err = run(capsys, "replay", day)
    assert code == 0
    assert "cut at byte" in err
    assert out


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["/nowhere"], 70, "No such file"),
        (["/proc"], 70, "no segment of a record"),
        (["{day}", "--until", "noon"], 64, "'noon' is not a time"),
        (["{day}", "--speed", "0"], 64, "0 is not a positive number"),
        (["{day}", "-o", "report", "--until", "1970-01-02T00:00:00Z"], 70, "no published report"),
    ],
)
def test_invalid_replay_is_refused(
    args: list[str], code: int, text: str, day: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, err = run(capsys, "replay", *(arg.format(day=day) for arg in args))
    assert found == code
    assert text in err

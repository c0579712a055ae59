"""Scoreboard: scores of a finding against a label, other detectors' patterns, the command, and the page."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from agent.model.health import Severity
from agent.scoreboard import main as command
from agent.scoreboard.detectors import (
    BYSTANDER_GPU,
    BYSTANDER_NIC,
    Detection,
    PatternDetector,
    load_detectors,
    run_incident,
)
from agent.scoreboard.incidents import (
    NODE,
    CorpusError,
    CorpusSplit,
    ExpectedVerdict,
    LabelledIncident,
    LineOrigin,
    NvmlChange,
    SeverityName,
    find_corpus,
    load_incidents,
)
from agent.scoreboard.report import (
    Findings,
    IncidentScore,
    Scoreboard,
    build_scoreboard,
    format_markdown,
    run_own,
    score_incident,
)
from agent.version import VERSION

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "scoreboard.md"
CORPUS: Final = find_corpus()
GPU: Final = "0000:3b:00.0"
LOST: Final = f"NVRM: Xid (PCI:{GPU[:-2]}): 79, pid=1, name=a, GPU has fallen off the bus."
MINIMA: Final = {
    CorpusSplit.OPEN: {"detected": 133, "right_device": 133, "right_severity": 132, "exact": 129},
    CorpusSplit.HELD_OUT: {"detected": 51, "right_device": 51, "right_severity": 51, "exact": 50},
}
"""Scores of the agent that no change may fall below, for incidents with kernel log lines."""
INCIDENTS: Final = load_incidents(CORPUS)
RUNS: Final = {run.detector.name: run for run in load_detectors(CORPUS)}


def incident(
    *log: str, harmless: bool = False, expect: Iterable[ExpectedVerdict] = (), **more: Any
) -> LabelledIncident:
    """Return an incident with one GPU."""
    return LabelledIncident(
        name="some-incident",
        what="A fault.",
        origin=LineOrigin.SYNTHETIC,
        source="https://example.com/",
        licence="none",
        log=log,
        gpus=(GPU,),
        harmless=harmless,
        expect=tuple(expect),
        **more,
    )


def verdict(device: str = GPU, severity: SeverityName = "unhealthy", part: str = "") -> ExpectedVerdict:
    """Return an expected verdict."""
    return ExpectedVerdict(device=device, severity=severity, code="gpu.xid.79", part=part)


def detection(
    device: str = GPU, severity: Severity = Severity.UNHEALTHY, code: str = "gpu.xid.79"
) -> Detection:
    """Return a finding."""
    return Detection(device, severity, code)


def columns(score: IncidentScore) -> tuple[bool, bool, bool, bool, int]:
    """Return what the columns of the scoreboard count."""
    return (
        score.is_detected,
        score.is_right_device,
        score.is_right_severity,
        score.is_exact,
        len(score.false_alarms),
    )


# --- scores -------------------------------------------------------------------------------------------------

FAULTS: Final = [
    ("nothing found", [verdict()], [], (False, False, False, False, 0)),
    ("right", [verdict()], [detection()], (True, True, True, True, 0)),
    ("other code", [verdict()], [detection(code="xid 79")], (True, True, True, False, 0)),
    ("event only", [verdict()], [detection(severity=Severity.INFO)], (True, True, False, False, 0)),
    ("only the node", [verdict()], [detection(NODE)], (True, False, True, False, 0)),
    ("too severe", [verdict(severity="degraded")], [detection()], (True, True, False, False, 0)),
    ("wrong device", [verdict()], [detection(BYSTANDER_GPU)], (False, False, False, False, 1)),
    ("bystander too", [verdict()], [detection(), detection(BYSTANDER_GPU)], (True, True, True, True, 1)),
    ("note on the bystander", [verdict()], [detection(), detection(BYSTANDER_GPU, Severity.INFO)],
     (True, True, True, True, 0)),
    ("one of two", [verdict(), verdict("cpu-node0")], [detection()], (True, False, False, False, 0)),
    ("all GPUs", [verdict("gpus")], [detection(), detection(BYSTANDER_GPU)], (True, True, True, True, 0)),
    ("the switch", [verdict("gpus", part="0000:05:00.0")], [detection("0000:05:00.0")],
     (True, True, True, False, 0)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("label", "findings", "expected"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS]
)
def test_score_of_a_fault_compares_device_severity_and_code(
    label: list[ExpectedVerdict], findings: list[Detection], expected: tuple[bool, bool, bool, bool, int]
) -> None:
    assert columns(score_incident(incident(expect=label), tuple(findings))) == expected


@pytest.mark.parametrize(
    ("findings", "alarms"),
    [
        ([], 0),
        ([detection(severity=Severity.INFO)], 0),
        ([detection(NODE, Severity.DEGRADED)], 1),
        ([detection()], 1),
    ],
)
def test_score_of_a_harmless_event_counts_false_alarms(findings: list[Detection], alarms: int) -> None:
    score = score_incident(incident(harmless=True), tuple(findings))
    assert columns(score) == (False, False, False, False, alarms)


# --- the agent ----------------------------------------------------------------------------------------------


def test_run_incident_gives_the_verdicts_of_the_agent() -> None:
    assert {each[:3] for each in run_incident(incident(LOST))} == {(GPU, Severity.UNHEALTHY, "gpu.xid.79")}


def test_run_incident_without_a_fault_finds_nothing() -> None:
    assert run_incident(incident("usb 1-1.2: reset high-speed USB device")) == ()


def test_run_incident_names_a_declared_function_by_its_address() -> None:
    line = f"mlx5_core {BYSTANDER_NIC}: poll_health:852:(pid 0): device's health compromised - reached"
    devices = {each.device for each in run_incident(incident(line))}
    assert devices == {BYSTANDER_NIC, NODE}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"status": 15}, "gpu.lost"),
        ({"readings": {"remap_failure": 1}}, "gpu.remap.failure"),
        ({"xid": 48}, "gpu.xid.48"),
    ],
)
def test_run_incident_applies_changes_of_nvml(change: dict[str, Any], code: str) -> None:
    nvml = (NvmlChange(gpu=GPU, after_s=2, **change),)
    assert (GPU, code) in {(each.device, each.code) for each in run_incident(incident(nvml=nvml))}


def test_run_incident_of_a_gpu_that_returns_ends_its_loss() -> None:
    nvml = (NvmlChange(gpu=GPU, after_s=2, status=15), NvmlChange(gpu=GPU, after_s=30))
    assert "gpu.lost" in {each.code for each in run_incident(incident(nvml=nvml))}


# --- other detectors ----------------------------------------------------------------------------------------


def reports(name: str, line: str) -> set[tuple[str, Severity]]:
    """Return devices and severities that a detector reports for a line."""
    return {(each.device, each.severity) for each in RUNS[name].find(incident(line))}


BAD: Final = Severity.UNHEALTHY
NOTE: Final = Severity.INFO
SOURCE_TRACK: Final = (
    f"NVRM: Xid (PCI:{GPU[:-2]}): 145, RLW_SRC_TRACK Nonfatal XC0 i0 Link 03 "
    "(0x040868e2 0x{status:08x} 0x0)"
)
OTHERS: Final = [
    ("node-problem-detector", "EXT4-fs (md0): Remounting filesystem read-only", {(NODE, BAD)}),
    ("node-problem-detector", "EXT4-fs (md0): Remounting filesystem read-only now", set()),
    ("node-problem-detector", "INFO: task docker:7 blocked for more than 120 seconds.",
     {(NODE, NOTE), (NODE, BAD)}),
    ("node-problem-detector", LOST, set()),
    ("gpud", LOST, {(GPU, BAD)}),
    ("gpud", LOST.replace(" 79,", " 13,"), {(GPU, NOTE)}),
    ("gpud", LOST.replace(" 79,", " 94,"), {(GPU, Severity.DEGRADED)}),
    ("gpud", LOST.replace(" 79,", " 999,"), set()),
    ("gpud", f"NVRM: GPU {GPU}: GPU has fallen off the bus.", {(GPU, BAD)}),
    ("gpud", SOURCE_TRACK.format(status=1), {(GPU, BAD)}),
    ("gpud", SOURCE_TRACK.format(status=8), {(GPU, NOTE)}),
    ("gpud", SOURCE_TRACK.format(status=8).replace("Nonfatal", "Fatal"), {(GPU, BAD)}),
    ("gpud", "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 3 x", {("0000:05:00.0", BAD)}),
    ("nvsentinel", LOST, {(GPU, BAD)}),
    ("nvsentinel", LOST.replace(" 79,", " 13,"), {(GPU, NOTE)}),
    ("nvsentinel", SOURCE_TRACK.format(status=8), {(GPU, BAD)}),
    ("nvsentinel", SOURCE_TRACK.format(status=2), {(GPU, NOTE)}),
    ("nvsentinel", SOURCE_TRACK.format(status=3), {(GPU, NOTE)}),
    ("nvsentinel", "efa 0000:00:06.0: Admin queue is closed", {("0000:00:06.0", BAD)}),
    ("nvsentinel", "ena 0000:00:05.0 eth0: Admin queue is closed", set()),
    ("nvsentinel", "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 1, Non-fatal, Link 3 x",
     {("0000:05:00.0", NOTE)}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "line", "expected"), OTHERS)
def test_detector_reports_the_findings_of_its_patterns(
    name: str, line: str, expected: set[tuple[str, Severity]]
) -> None:
    assert reports(name, line) == expected


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_detector_file_has_origin_version_and_disjoint_lists(run: PatternDetector) -> None:
    detector = run.detector
    assert detector.version
    assert detector.licence
    assert all(link.startswith("https://") for link in detector.origin)
    for table in detector.table:
        lists = (table.unhealthy, table.degraded, table.info)
        assert len(frozenset.union(*lists)) == sum(map(len, lists))


@pytest.mark.parametrize(
    ("detector", "before", "after", "what"),
    [
        ("node-problem-detector", "Killed process", "(Killed process", r"missing \)"),
        ("node-problem-detector", 'severity = "info"', 'severity = "bad"', "Invalid enum value 'bad'"),
        ("node-problem-detector", "Killed process", "\xff", "can't decode byte 0xff"),
        ("gpud", "?P<code>", "?P<number>", r"no group \(\?P<code>"),
    ],
)
def test_load_detectors_of_an_invalid_file_raises_and_names_it(
    detector: str, before: str, after: str, what: str, tmp_path: Path
) -> None:
    folder = tmp_path / "detectors"
    folder.mkdir()
    (folder / "nvlink5.tsv").write_text("")
    text = (CORPUS / "detectors" / f"{detector}.toml").read_text()
    assert before in text
    (folder / "bad.toml").write_text(text.replace(before, after), encoding="latin-1")
    with pytest.raises(CorpusError, match=rf"bad\.toml: .*{what}"):
        load_detectors(tmp_path)


@pytest.mark.parametrize("row", ["145\tA", "x\tA\t0\t0\t0\t0\tnone"])
def test_load_detectors_of_an_invalid_nvlink_row_raises_and_names_its_file(row: str, tmp_path: Path) -> None:
    (tmp_path / "detectors").mkdir()
    (tmp_path / "detectors/nvlink5.tsv").write_text(f"{row}\n")
    with pytest.raises(CorpusError, match=r"nvlink5\.tsv: "):
        load_detectors(tmp_path)


# --- the command and the page -------------------------------------------------------------------------------


def scoreboard(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-m", "agent.scoreboard", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def findings() -> Findings:
    """Reports of the agent for all incidents."""
    return run_own(INCIDENTS)


@pytest.fixture(scope="module", params=CorpusSplit)
def board(findings: Findings, request: pytest.FixtureRequest) -> Scoreboard:
    """Scores of one part of the corpus."""
    return build_scoreboard(INCIDENTS, request.param, findings, "0", RUNS.values())


def test_scores_of_the_agent_do_not_fall(board: Scoreboard) -> None:
    assert board.split
    own, minima = board.own.counts(), MINIMA[board.split]
    assert {name: own[name] for name in minima if own[name] < minima[name]} == {}


def test_agent_has_no_false_alarm(board: Scoreboard) -> None:
    assert [score.incident.name for part in (board.own, board.nvml) for score in part.alarmed] == []


def test_scores_have_all_incidents_and_detectors(board: Scoreboard) -> None:
    names = {score.name for score in board.scores}
    assert names == {"drahealth", *RUNS}
    own = (board.own, board.nvml)
    assert sum(len(part.faults) + len(part.harmless) for part in own) == len(board.incidents)


def test_scoreboard_page_is_current(findings: Findings) -> None:
    page = format_markdown(INCIDENTS, findings, VERSION, tuple(RUNS.values()))
    assert PAGE.read_text() == page, "run: python -m agent.scoreboard --write docs/scoreboard.md"


def test_scoreboard_page_names_no_held_out_miss(findings: Findings) -> None:
    held = build_scoreboard(INCIDENTS, CorpusSplit.HELD_OUT, findings, "0", ())
    page = format_markdown(INCIDENTS, findings, VERSION, ())
    missed = [*held.own.missed, *held.nvml.missed]
    assert [score.incident.name for score in missed if f"`{score.incident.name}`" in page] == []


@pytest.mark.live
def test_scoreboard_as_json_has_the_counts_of_the_agent(findings: Findings) -> None:
    run = scoreboard("--split", "held-out", "--json")
    assert run.returncode == 0
    board = build_scoreboard(INCIDENTS, CorpusSplit.HELD_OUT, findings, "0", ())
    own = json.loads(run.stdout)["kernelLog"][0]
    assert {name: own[name] for name in board.own.counts()} == board.own.counts()


@pytest.mark.live
def test_scoreboard_with_misses_lists_them_after_the_table() -> None:
    run = scoreboard("--split", "held-out", "--misses")
    assert run.returncode == 0
    assert "right severity" in run.stdout
    assert "node-problem-detector: " in run.stdout


@pytest.mark.live
def test_scoreboard_page_of_one_part_is_refused(tmp_path: Path) -> None:
    run = scoreboard("--write", str(tmp_path / "page.md"), "--split", "open")
    assert run.returncode == 2
    assert "cannot be combined with --split" in run.stderr


@pytest.mark.live
def test_scoreboard_page_in_a_missing_folder_fails_and_names_it(tmp_path: Path) -> None:
    run = scoreboard("--write", str(tmp_path / "missing" / "page.md"))
    assert run.returncode == 1
    assert "missing/page.md: cannot be written: No such file" in run.stderr


@pytest.mark.parametrize(
    "error", [TimeoutError("incident 'a': the log reader did not read 'b'"), OSError("no space for the log")]
)
def test_scoreboard_page_whose_replay_fails_stays_and_is_not_named(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Findings:
        raise error

    (tmp_path / "page.md").write_text("a page")
    monkeypatch.setattr(command, "run_own", fail)
    monkeypatch.setattr(sys, "argv", ["scoreboard", "--write", str(tmp_path / "page.md")])
    assert command.main() == 1
    assert capsys.readouterr().err == f"python -m agent.scoreboard: {error}\n"
    assert (tmp_path / "page.md").read_text() == "a page"

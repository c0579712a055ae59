"""``drahealth history``: changes of verdicts and availability, as tables, JSON and CSV, with real files."""

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from usage_samples import device_usage
from verdict_samples import GPU, HEALTHY, HOT, LOST, OTHER_GPU, SimulatedNode

from agent.cli.history.text import (
    CHANGE_COLUMNS,
    SEVERITIES,
    SUMMARY_COLUMNS,
    USE_COLUMNS,
    WORDS,
    format_share,
    render_changes,
    render_summary,
)
from agent.cli.main import main
from agent.cli.output.terminal import TextStyle
from agent.health.availability_statistics import ObservedTimeAxis, listed_changes, summarize, verdict_spans
from agent.model.claim import DeviceRef
from agent.model.history import RecordedCause, RecordedState, VerdictChange
from agent.model.settings import HISTORY_FILE, UsageHistoryLimits
from agent.model.time import rfc3339
from agent.store.history_file import HistoryFile

DAY_S = 86_400.0


class Recorded:
    """State directory of an agent that has observed two GPUs for four days; one failed and flapped."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state = directory / "state"
        self.procfs = directory / "proc"
        self.capsys = capsys
        self.node = SimulatedNode(wall_s=time.time() - 4 * DAY_S)
        self.node.start((GPU, HEALTHY), (OTHER_GPU, HEALTHY))
        self.node.follow((HEALTHY, DAY_S), (LOST, 1800))
        self.node.stop(600)
        self.node.reboot()
        self.node.start((GPU, HEALTHY))
        self.node.follow((HEALTHY, DAY_S), *[(LOST, 120), (HEALTHY, 600)] * 3)
        self.node.follow((HOT, 60), device=OTHER_GPU)
        self.node.run(time.time() - self.node.wall_s)
        self.file = HistoryFile(self.state / HISTORY_FILE, UsageHistoryLimits())
        self.file.write_verdicts(self.node.periods, self.node.changes, self.node.wall_s, delete_by_age=False)

    def run(self, *argv: str) -> tuple[int, str, str]:
        """Run the command; return exit code, output and errors."""
        code = main(["history", "--state-dir", str(self.state), "--procfs-root", str(self.procfs), *argv])
        return code, *self.capsys.readouterr()

    def output(self, *argv: str) -> str:
        code, out, err = self.run(*argv)
        assert (code, err) == (0, "")
        return out

    def document(self, *argv: str) -> Any:
        return json.loads(self.output("-o", "json", *argv))

    def rows(self, *argv: str) -> list[dict[str, str]]:
        """Return the rows of a CSV by their titles."""
        return list(csv.DictReader(io.StringIO(self.output("-o", "csv", *argv))))


@pytest.fixture
def recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Recorded:
    return Recorded(tmp_path, capsys)


# --- tables ------------------------------------------------------------------------------------------------


def segments_of(node: SimulatedNode) -> tuple[Any, ObservedTimeAxis]:
    timeline = ObservedTimeAxis(node.stored.periods, node.clocks)
    return verdict_spans(node.stored, timeline), timeline


def test_table_of_changes_has_times_states_and_causes(recorded: Recorded) -> None:
    at = [rfc3339(change.at_s) for change in recorded.node.changes if change.device == GPU]
    lines = recorded.output("--changes", "--device", "gpu-3").splitlines()
    assert lines[:3] == [
        "8 changes of verdicts, of 1 device",
        "",
        "  CHANGED               FROM       TO         LASTED  DEVICE",
    ]
    assert lines[3] == f"● {at[-1]}  Unhealthy  Healthy    >46h    gpu-3"
    assert lines[-4:] == [
        f"● {at[2]}  Unhealthy  Healthy    24h     gpu-3",
        "    found by the first report of the agent; changed while the agent did not run",
        f"✖ {at[1]}  Healthy    Unhealthy  40m     gpu-3",
        "    gpu.xid.79: 1 time",
    ]


def test_table_of_devices_has_shares_faults_and_rules(recorded: Recorded) -> None:
    lines = recorded.output("--summary").splitlines()
    assert lines[0].startswith("2 devices: 0.6 of 192.0 device-hours lost")
    titles = "  OVER  HEALTHY  UNHEALTHY  UNKNOWN  NO DATA  FAULTS  MTBF  MTTR  LOST  DEVICE"
    assert lines[2] == titles
    assert lines[3] == "● 4d    99.2%    0.6%       0%       0.2%     4       23h   11m   36m   gpu-3"
    assert lines[4] == "▲ 4d    99.8%    0%         0%       0.2%     0       -     -     0s    gpu-4"
    assert "  flaps  gpu-3: stopped being usable 3 times in an hour" in lines
    assert [line.split()[:3] for line in lines[-2:]] == [["4", "36m", "gpu.xid.79"], ["1", "46h", "gpu.heat"]]


def test_tables_fit_80_columns(recorded: Recorded) -> None:
    node = recorded.node
    many = LOST._replace(causes=(RecordedCause("cpu.x.y", LOST.causes[0].severity, "word " * 60),))
    node.follow((many, 60))
    for number in range(40):
        node.follow((many, 60), device=DeviceRef("", "node-1", f"hugepages-2mi-node{number * 7}"))
    spans, timeline = segments_of(node)
    style = TextStyle(width=80)
    text = render_changes(listed_changes(spans), style) + render_summary(summarize(spans, timeline), style)
    names = [line for line in text.splitlines() if len(line) > 80]
    assert [line for line in names if "hugepages" not in line] == []


def test_tables_have_no_control_characters() -> None:
    node = SimulatedNode()
    device = DeviceRef("", "node-1", "gpu\x1b[2J")
    node.start((device, HEALTHY))
    bad = LOST._replace(causes=(RecordedCause("x\x07", LOST.causes[0].severity, "\x1b[2J"),))
    node.follow((bad, 60), device=device)
    spans, timeline = segments_of(node)
    style = TextStyle(unicode=False)
    text = render_changes(listed_changes(spans), style) + render_summary(summarize(spans, timeline), style)
    assert not {"\x1b", "\x07"} & set(text)
    assert text.replace("\ufffd", "").isascii()


def test_every_state_has_a_word_and_a_sign() -> None:
    assert set(WORDS) == set(SEVERITIES) == set(RecordedState)


@pytest.mark.parametrize(
    ("part", "text"),
    [(0, "0%"), (1e-9, "<0.1%"), (0.5, "50.0%"), (0.9999, ">99.9%"), (1, "100%"), (1.0000001, "100%")],
)
def test_share_is_100_percent_only_of_everything(part: float, text: str) -> None:
    assert format_share(part, 1.0) == text
    assert format_share(0.0, 0.0) == "0%"


# --- documents ---------------------------------------------------------------------------------------------


def test_document_of_a_device_has_changes_and_uses(recorded: Recorded) -> None:
    recorded.file.write_uses((device_usage(3, active=True),), (), time.time(), delete_by_age=False)
    document = recorded.document("--device", "gpu-3", "--since", "7d")
    assert len(document["changes"]) == 8
    assert [use["pod"]["uid"] for use in document["uses"]] == ["p-3"]
    first = document["changes"][-1]
    assert first == {
        "device": {"driver": "", "pool": "node-1", "name": "gpu-3"},
        "at": rfc3339(recorded.node.changes[2].at_s),
        "from": "healthy",
        "to": "unhealthy",
        "causes": [{"code": "gpu.xid.79", "severity": "unhealthy", "evidence": "1 time"}],
        "lastedSeconds": pytest.approx(2400, abs=0.01),
        "notObservedSeconds": pytest.approx(600, abs=0.01),
        "continues": False,
        "foundAtStart": False,
    }
    assert document["changes"][-2]["foundAtStart"]


def test_views_select_changes_or_uses(recorded: Recorded) -> None:
    recorded.file.write_uses((device_usage(3, active=True),), (), time.time(), delete_by_age=False)
    assert set(recorded.document("--changes")) == {"apiVersion", "file", "lastWritten", "changes"}
    assert set(recorded.document("--uses")) == {"apiVersion", "file", "lastWritten", "uses"}
    assert recorded.document("--pod", "p-3")["changes"] == []
    assert {change["to"] for change in recorded.document("--bad")["changes"]} == {"degraded", "unhealthy"}
    assert len(recorded.document("--changes", "--since", "2d")["changes"]) == 7


def test_document_of_the_summary_sums_to_the_wall_time(recorded: Recorded) -> None:
    for window in ((), ("--since", "2d")):
        document = recorded.document("--summary", *window)
        for device in document["devices"]:
            days = 2 if window else 4
            assert sum(device["seconds"].values()) == pytest.approx(days * DAY_S, abs=60)
            assert sum(device["shares"].values()) == pytest.approx(1, abs=1e-4)
    assert [rule["code"] for rule in recorded.document("--summary")["rules"]] == ["gpu.xid.79", "gpu.heat"]


def test_flapping_lists_only_devices_that_flap(recorded: Recorded) -> None:
    assert [device["device"]["name"] for device in recorded.document("--flapping")["devices"]] == ["gpu-3"]
    assert recorded.document("--flapping", "--since", "1h")["devices"] == []
    assert recorded.output("--flapping", "--since", "1h") == "no device flaps\n"


def test_csv_has_the_values_of_the_document(recorded: Recorded) -> None:
    rows, document = recorded.rows("--changes"), recorded.document("--changes")
    assert list(rows[0]) == list(CHANGE_COLUMNS)
    assert [row["to"] for row in rows] == [change["to"] for change in document["changes"]]
    assert rows[-1]["codes"] == "gpu.xid.79"
    rows, document = recorded.rows("--summary"), recorded.document("--summary")
    assert list(rows[0]) == list(SUMMARY_COLUMNS)
    assert [row["faults"] for row in rows] == [str(device["faults"]) for device in document["devices"]]
    assert rows[1]["mean_time_to_recover_seconds"] == ""


def test_csv_of_uses_has_their_ends(recorded: Recorded) -> None:
    uses = (device_usage(3), device_usage(4, active=True))
    recorded.file.write_uses(uses, (), time.time(), delete_by_age=False)
    rows = recorded.rows("--uses")
    assert list(rows[0]) == list(USE_COLUMNS)
    assert [(row["pod_uid"], row["how"], row["lasted_seconds"]) for row in rows] == [
        ("p-4", "", ""),
        ("p-3", "released", "3600.0"),
    ]


# --- flags -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["-o", "csv"], "-o csv is one table: add --changes, --uses, --summary or --flapping"),
        (["--summary", "--pod", "x"], "--pod selects uses of devices and cannot be combined with --summary"),
        (
            ["--changes", "--claim", "x"],
            "--claim selects uses of devices and cannot be combined with --changes",
        ),
        (["--flapping", "--bad"], "--bad selects changes and uses and cannot be combined with --flapping"),
        (["--device", "gpu-33"], "nothing is recorded of device 'gpu-33'; did you mean 'gpu-3'?"),
        (["--summary", "--device", "gpu-33"], "nothing is recorded of device 'gpu-33'; did you mean"),
        (["--summary", "--changes"], "not allowed with argument"),
        (["--since", "7w"], "'7w' is not a duration"),
    ],
)
def test_contradicting_flags_and_unknown_names_exit_64(
    recorded: Recorded, argv: list[str], reason: str
) -> None:
    code, out, err = recorded.run(*argv)
    assert (code, out) == (64, "")
    assert reason in err


def test_summary_of_a_device_with_uses_only_is_empty(recorded: Recorded) -> None:
    recorded.file.write_uses((device_usage(7),), (), time.time(), delete_by_age=False)
    assert recorded.run("--uses", "--device", "gpu-7")[0] == 0
    code, out, err = recorded.run("--summary", "--device", "gpu-7")
    assert (code, out, err) == (0, "no recorded device matches\n", "")


@pytest.mark.parametrize("view", ["--changes", "--summary"])
def test_missing_file_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], view: str) -> None:
    assert main(["history", view, "--state-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("nothing is recorded\n")


@pytest.mark.parametrize("argv", [["--device", "gpu-3"], ["--pod", "a"], ["--summary", "--device", "gpu-3"]])
def test_name_without_a_history_file_exits_64(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main(["history", *argv, "--state-dir", str(tmp_path)]) == 64
    out, err = capsys.readouterr()
    name = f"{argv[-2].removeprefix('--')} {argv[-1]!r}"
    file = tmp_path / "history.sqlite"
    assert (out, err) == (
        "",
        f"drahealth: nothing is recorded of {name}: history file {file} does not exist\n",
    )


def test_newest_40_changes_are_shown_and_the_others_counted(recorded: Recorded) -> None:
    recorded.node.follow(*[(LOST, 1), (HEALTHY, 1)] * 50)
    changes: list[VerdictChange] = recorded.node.changes
    recorded.file.write_verdicts(recorded.node.periods, changes, time.time(), delete_by_age=False)
    text = recorded.output()
    assert text.startswith("the newest 40 of 109 changes, of 1 device\n")
    assert "older  69 changes: shown with --all" in text
    assert recorded.output("--all").startswith("109 changes of verdicts, of 2 devices\n")

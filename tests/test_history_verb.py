"""``drahealth history``, and pods that are gone in ``drahealth explain``, with real files."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claim_samples import NAMESPACE, at
from explain_node import Node, podresources_answer, pods_answer, prepared_claim
from other_user import become_other_user
from usage_samples import GOOD, LOST, SLOW, device_usage

from agent.cli.history.text import END_WORDS, render
from agent.cli.main import main
from agent.cli.output.terminal import TextStyle
from agent.model.claim_sources import PodRef
from agent.model.device_usage import PodDeviceUsage, UsageEnd, UsageEndKind
from agent.model.settings import HISTORY_FILE, UsageHistoryLimits
from agent.store.history_file import HistoryFile

NOW_S = at(3660).wall_s


def ended_usage(
    number: int,
    ending: UsageEndKind = UsageEndKind.RELEASED,
    ago_s: float = 60,
    lasted_s: float = 3600,
    **more: Any,
) -> PodDeviceUsage:
    """Return a usage that ended `ago_s` ago."""
    end = UsageEnd(ending, NOW_S - ago_s - 5, NOW_S - ago_s, lasted_s)
    return device_usage(number, ended=end, **more)


TRAINED = ended_usage(1, UsageEndKind.SUCCEEDED)
BROKE = ended_usage(2, UsageEndKind.FAILED, state=LOST, worst=LOST)
RECOVERED = ended_usage(3, state=GOOD, worst=SLOW, owner="")
RUNS = device_usage(4, active=True, before=True)


def render_uses(*uses: PodDeviceUsage, **more: Any) -> str:
    return render(uses, TextStyle(), now_s=NOW_S, left_s=NOW_S - 30, **more)


# --- the list ----------------------------------------------------------------------------------------------


def test_table_has_a_row_per_use_and_its_findings() -> None:
    assert render_uses(RUNS, BROKE, RECOVERED, TRAINED) == (
        "4 uses of devices: 1 running, 3 ended, 1 of them with a device that was not healthy at the end\n"
        "\n"
        "  ENDED    LASTED  POD             OWNER      CLAIM        DEVICE                        "
        "HOW        STATE\n"
        "● running  >61m    team-a/train-4  Job train  team-a/gpus  gpu.example.com/node-1/gpu-4  "
        "           Healthy\n"
        "✖ 60s ago  60m     team-a/train-2  Job train  team-a/gpus  gpu.example.com/node-1/gpu-2  "
        "failed     Unhealthy\n"
        "    gpu.xid.79: 1 time (since 1970-01-01T00:00:03Z)\n"
        "● 60s ago  60m     team-a/train-3             team-a/gpus  gpu.example.com/node-1/gpu-3  "
        "released   Healthy\n"
        "    in between Degraded: gpu.heat: 91 C, 90 allowed (since 1970-01-01T00:00:02Z)\n"
        "● 60s ago  60m     team-a/train-1  Job train  team-a/gpus  gpu.example.com/node-1/gpu-1  "
        "succeeded  Healthy\n"
        "\n"
        "  running  as of 30s ago or later; 'drahealth explain' shows the present\n"
    )


def test_running_use_is_not_counted_as_ended() -> None:
    out = render([device_usage(active=True, state=LOST)], TextStyle(), now_s=NOW_S, left_s=NOW_S)
    assert out.startswith("1 use of a device: 1 running, 0 ended\n")


def test_end_without_a_running_agent_shows_both_times() -> None:
    text = render_uses(ended_usage(1, UsageEndKind.AWAY))
    assert "ended between 2023-11-14T23:13:15Z and 2023-11-14T23:13:20Z, while the agent did not run" in text


def test_possible_pod_name_has_a_question_mark() -> None:
    text = render_uses(ended_usage(1, pod=PodRef("", "", "p-1"), maybe=("team-a/web-0", "team-a/web-1")))
    assert "team-a/web-0? or team-a/web-1?" in text
    assert "pod p-1" in render_uses(ended_usage(1, pod=PodRef("", "", "p-1")))


def test_every_ending_has_a_text() -> None:
    assert set(END_WORDS) == set(UsageEndKind)


def test_document_names_the_words_of_the_table_and_of_json() -> None:
    _, _, text = (
        (Path(__file__).parent.parent / "docs/history.md").read_text().partition("## Uses of devices")
    )
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    documented = {json_word.strip(" `"): word.strip(" `") for word, json_word in rows}
    assert documented == {str(kind): word for kind, word in END_WORDS.items()}


def test_table_is_ascii_and_has_no_control_characters() -> None:
    odd = ended_usage(1, owner="Job \x1b[2J", state=LOST._replace(evidence="\x07"))
    text = render((odd,), TextStyle(unicode=False), now_s=NOW_S, left_s=NOW_S)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.replace("\ufffd", "").isascii()


# --- the file ----------------------------------------------------------------------------------------------


class Recorded:
    """State directory of an agent."""

    def __init__(self, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state = state
        self.capsys = capsys

    @property
    def path(self) -> Path:
        return self.state / HISTORY_FILE

    def store(self, *uses: PodDeviceUsage) -> None:
        HistoryFile(self.path, UsageHistoryLimits()).write_uses(uses, (), NOW_S, delete_by_age=False)

    def run(self, *argv: str) -> tuple[int, str, str]:
        """Run the command; return exit code, output and errors."""
        code = main(["history", "--state-dir", str(self.state), *argv])
        return code, *self.capsys.readouterr()

    def pods(self, *argv: str) -> list[str]:
        """Return the UIDs of the pods in the document."""
        code, out, err = self.run("-o", "json", *argv)
        assert (code, err) == (0, "")
        return [use["pod"]["uid"] for use in json.loads(out)["uses"]]


@pytest.fixture
def node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Recorded:
    return Recorded(tmp_path / "state", capsys)


def test_running_uses_come_first_then_the_newest(node: Recorded) -> None:
    node.store(TRAINED, BROKE, RUNS)
    assert node.pods() == ["p-4", "p-2", "p-1"]
    code, out, err = node.run()
    assert (code, err) == (0, "")
    assert out.startswith("3 uses of devices: 1 running, 2 ended, 1 of them")


def test_state_directory_that_is_a_file_is_an_error(node: Recorded) -> None:
    node.state.write_text("a file")
    assert node.run() == (
        70,
        "",
        f"drahealth: history file {node.state}/history.sqlite: cannot be read: Not a directory\n",
    )


def test_unhealthy_end_exits_0(node: Recorded) -> None:
    node.store(BROKE)
    assert node.run()[0] == 0


@pytest.mark.parametrize(
    ("argv", "uids"),
    [
        (["--pod", "team-a/train-2"], ["p-2"]),
        (["--pod", "train-2"], ["p-2"]),
        (["--pod", "p-2"], ["p-2"]),
        (["--claim", "c-1"], ["p-1"]),
        (["--claim", "team-a/gpus"], ["p-4", "p-3", "p-2", "p-1"]),
        (["--device", "gpu.example.com/node-1/gpu-3"], ["p-3"]),
        (["--device", "node-1/gpu-3"], ["p-3"]),
        (["--device", "gpu-3"], ["p-3"]),
        (["--bad"], ["p-3", "p-2"]),
        (["--bad", "--device", "gpu-2"], ["p-2"]),
    ],
)
def test_flags_select_uses(node: Recorded, argv: list[str], uids: list[str]) -> None:
    node.store(TRAINED, BROKE, RECOVERED, RUNS)
    assert node.pods(*argv) == uids


def test_possible_pod_name_selects_the_use(node: Recorded) -> None:
    node.store(ended_usage(1, pod=PodRef("", "", "p-1"), maybe=("team-a/web-0",)))
    assert node.pods("--pod", "team-a/web-0") == ["p-1"]


def test_since_leaves_out_older_uses(node: Recorded) -> None:
    now_s = time.time()
    late, early = (UsageEnd(UsageEndKind.RELEASED, now_s - ago, now_s - ago, 1.0) for ago in (60, 7200))
    node.store(device_usage(1, ended=early), device_usage(2, ended=late), RUNS)
    assert node.pods("--since", "1h") == ["p-4", "p-2"]
    assert node.run("--since", "1 hour")[0] == 64


def test_table_shows_the_newest_and_counts_the_others(node: Recorded) -> None:
    node.store(*(ended_usage(number) for number in range(100)))
    _, out, _ = node.run()
    assert "the newest 40 of 100 uses" in out
    assert "60 uses: shown with --all" in out
    assert "train-59 " not in out
    _, out, _ = node.run("--all")
    assert "train-0 " in out
    assert len(node.pods()) == 100


def test_unknown_pod_is_refused_with_a_suggestion(node: Recorded) -> None:
    node.store(TRAINED)
    assert node.run("--pod", "team-a/trian-1") == (
        64,
        "",
        "drahealth: no use of pod 'team-a/trian-1' is recorded; did you mean 'team-a/train-1'?\n",
    )


def test_missing_record_names_the_searched_file(node: Recorded) -> None:
    code, out, err = node.run()
    assert (code, err) == (0, "")
    assert out.startswith("nothing is recorded\n")
    assert str(node.path) in out
    assert not node.state.exists()
    assert node.pods() == []


def test_history_without_an_entry_states_so(node: Recorded) -> None:
    node.store()
    assert node.run() == (0, "no change or use is recorded yet\n", "")
    assert node.run("--uses") == (0, "no use is recorded yet\n", "")
    assert node.run("--since", "7d") == (0, "no recorded change or use matches\n", "")


def test_no_matching_use_prints_a_text(node: Recorded) -> None:
    node.store(TRAINED)
    assert node.run("--bad") == (0, "no recorded change or use matches\n", "")


def test_json_has_every_field(node: Recorded) -> None:
    node.store(BROKE)
    _, out, _ = node.run("-o", "json")
    document = json.loads(out)
    state = {
        "health": "Unhealthy",
        "severity": "unhealthy",
        "code": "gpu.xid.79",
        "evidence": "1 time",
        "since": "1970-01-01T00:00:03Z",
    }
    assert document == {
        "apiVersion": "drahealth/v1",
        "file": str(node.path),
        "lastWritten": "2023-11-14T23:14:20Z",
        "uses": [
            {
                "pod": {"namespace": NAMESPACE, "name": "train-2", "uid": "p-2"},
                "podMayBe": [],
                "owner": "Job train",
                "claim": {"namespace": NAMESPACE, "name": "gpus", "uid": "c-2"},
                "device": {"driver": "gpu.example.com", "pool": "node-1", "name": "gpu-2"},
                "requests": ["gpus"],
                "containers": ["main"],
                "began": "2023-11-14T22:13:20Z",
                "beganBefore": False,
                "toldBy": ["checkpoint"],
                "state": state,
                "worst": state,
                "ended": {
                    "how": "failed",
                    "lastSeen": "2023-11-14T23:13:15Z",
                    "noticed": "2023-11-14T23:13:20Z",
                    "lastedSeconds": 3600.0,
                },
            }
        ],
        "changes": [],
    }


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda path: path.write_bytes(b"scribble" * 1000),
            "history file cannot be parsed: file is not a database",
        ),
        (os.mkfifo, "is not a regular file"),
        (os.mkdir, "is not a regular file"),
    ],
)
def test_unusable_file_is_named_and_not_changed(node: Recorded, make: Any, reason: str) -> None:
    node.state.mkdir()
    make(node.path)
    code, out, err = node.run()
    assert (code, out) == (70, "")
    assert err == f"drahealth: history file {node.path}: {reason}\n"
    assert [file.name for file in node.state.iterdir()] == [HISTORY_FILE]


@pytest.fixture
def unreadable(node: Recorded) -> Iterator[Recorded]:
    """A record that this user may not read, also if the tests run as root."""
    node.store(TRAINED)
    node.path.chmod(0)
    before = os.geteuid()
    if before == 0:
        node.state.chmod(0o700)
        become_other_user()
    yield node
    os.seteuid(before)


def test_unreadable_file_exits_77_and_is_named(unreadable: Recorded) -> None:
    code, out, err = unreadable.run()
    assert (code, out) == (77, "")
    assert err == f"drahealth: history file {unreadable.path}: cannot be read: Permission denied\n"


# --- explain -----------------------------------------------------------------------------------------------


@pytest.fixture
def kubelet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Node:
    node = Node(tmp_path, capsys)
    HistoryFile(node.state / HISTORY_FILE, UsageHistoryLimits()).write_uses(
        (TRAINED, BROKE, RUNS), (), NOW_S, delete_by_age=False
    )
    node.write_checkpoint(prepared_claim("other", "gpu-2", pods=["u-other"]))
    return node


def test_history_without_uses_has_no_age_in_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path, capsys)
    HistoryFile(node.state / HISTORY_FILE, UsageHistoryLimits()).write_verdicts(
        (), (), NOW_S, delete_by_age=False
    )
    node.write_checkpoint(prepared_claim("other", "gpu-2", pods=["u-other"]))
    _, out, _ = node.explain("gpu-2")
    assert "history: 0 uses of devices, queried now (" in out
    _, document = node.document("gpu-2")
    assert [source["written"] for source in document["sources"] if source["source"] == "history"] == [None]


@pytest.mark.parametrize(
    "subject",
    [("pod", "team-a/train-2"), ("pod", "p-2"), ("claim", "c-2"), ("gpu.example.com/node-1/gpu-1",)],
)
def test_gone_subject_is_explained_from_the_record(kubelet: Node, subject: tuple[str, ...]) -> None:
    code, out, err = kubelet.explain(*subject)
    number = 1 if subject[-1].endswith("gpu-1") else 2
    assert (code, err) == (0 if number == 1 else 2, "")
    assert out.startswith("no longer on this node; recorded use:\n")
    assert f"team-a/train-{number}" in out
    assert "history: 3 uses of devices" in out


def test_device_shows_its_earlier_uses(kubelet: Node) -> None:
    _, document = kubelet.document("gpu.example.com/node-1/gpu-2")
    assert [use["pod"]["uid"] for use in document["ended"]] == ["p-2"]
    _, out, _ = kubelet.explain("gpu.example.com/node-1/gpu-2")
    assert "\nearlier use:\n" in out
    assert "gpu.xid.79: 1 time" in out


def test_existing_pod_shows_no_record_of_its_namesake(kubelet: Node) -> None:
    listed = podresources_answer(("train-2", "other", ["gpu-2"]))
    with kubelet.sockets(listed, pods_answer()):
        _, document = kubelet.document("pod", "team-a/train-2")
    assert document["ended"] == []
    assert [pod["name"] for pod in document["pods"]] == ["train-2"]


@pytest.mark.parametrize("subject", [("pod", "p-2"), ("claim", "c-2")])
def test_failed_pod_that_exists_shows_its_end(kubelet: Node, subject: tuple[str, ...]) -> None:
    """The device may have recovered since."""
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-2", uid="c-2", pods=["p-2"]))
    _, document = kubelet.document(*subject)
    assert [use["pod"]["uid"] for use in document["ended"]] == ["p-2"]
    _, out, _ = kubelet.explain(*subject)
    assert "\nearlier use:\n" in out


def test_corrupt_record_costs_only_its_own_content(kubelet: Node) -> None:
    (kubelet.state / HISTORY_FILE).write_bytes(b"scribble" * 1000)
    code, document = kubelet.document("gpu.example.com/node-1/gpu-2")
    assert code == 3
    (result,) = (source for source in document["sources"] if source["source"] == "history")
    assert result["costs"] == "earlier use of devices not known"
    assert "file cannot be parsed" in result["why"]


def test_use_written_twice_is_read_once(node: Recorded) -> None:
    node.store(TRAINED)
    node.store(replace(TRAINED, owner="Job other"))
    assert node.pods() == ["p-1"]

"""``drahealth history``, and what ``drahealth explain`` says of pods that are gone: real files."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claims_paper import NAMESPACE, at
from explain_node import Node, listing, pods_answer, prepared_claim
from uses_paper import GOOD, LOST, SLOW, a_use

from agent.cli.history.text import HOW, render
from agent.cli.main import main
from agent.cli.output.terminal import Style
from agent.model.claim_sources import PodRef
from agent.model.use_limits import Limits
from agent.model.uses import DeviceUsage, Ending, UsageEnd
from agent.node.pods.history_recorder import FILE
from agent.store.history import History

NOW_S = at(3660).wall_s


def ended(
    number: int, ending: Ending = Ending.RELEASED, ago_s: float = 60, lasted_s: float = 3600, **more: Any
) -> DeviceUsage:
    """A use that ended so long ago."""
    end = UsageEnd(ending, NOW_S - ago_s - 5, NOW_S - ago_s, lasted_s)
    return a_use(number, ended=end, **more)


TRAINED = ended(1, Ending.SUCCEEDED)
BROKE = ended(2, Ending.FAILED, state=LOST, worst=LOST)
RECOVERED = ended(3, state=GOOD, worst=SLOW, owner="")
RUNS = a_use(4, goes_on=True, before=True)


def shown(*uses: DeviceUsage, **more: Any) -> str:
    return render(uses, Style(), now_s=NOW_S, left_s=NOW_S - 30, **more)


# --- the list ----------------------------------------------------------------------------------------------


def test_each_use_has_a_line_and_what_was_wrong_below_it() -> None:
    assert shown(RUNS, BROKE, RECOVERED, TRAINED) == (
        "4 uses of devices: 1 running, 3 ended, 1 of them with a device that was not healthy\n"
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
        "    meanwhile Degraded: gpu.heat: 91 C, 90 allowed (since 1970-01-01T00:00:02Z)\n"
        "● 60s ago  60m     team-a/train-1  Job train  team-a/gpus  gpu.example.com/node-1/gpu-1  "
        "succeeded  Healthy\n"
        "\n"
        "  running  as of 30s ago, or later: 'explain' asks now\n"
    )


def test_of_those_that_run_nothing_is_said_to_have_ended_badly() -> None:
    out = render([a_use(goes_on=True, state=LOST)], Style(), now_s=NOW_S, left_s=NOW_S)
    assert out.startswith("1 use of a device: 1 running, 0 ended\n")


def test_of_what_ended_while_nobody_looked_both_times_are_told() -> None:
    text = shown(ended(1, Ending.AWAY))
    assert "ended between 2023-11-14T23:13:15Z and 2023-11-14T23:13:20Z, while the agent was away" in text


def test_a_name_that_a_pod_may_have_has_a_question_mark() -> None:
    text = shown(ended(1, pod=PodRef("", "", "p-1"), maybe=("team-a/web-0", "team-a/web-1")))
    assert "team-a/web-0? or team-a/web-1?" in text
    assert "pod p-1" in shown(ended(1, pod=PodRef("", "", "p-1")))


def test_every_ending_has_a_word() -> None:
    assert set(HOW) == set(Ending)


def test_the_list_is_ascii_where_the_terminal_is_and_nothing_moves_the_cursor() -> None:
    odd = ended(1, owner="Job \x1b[2J", state=LOST._replace(evidence="\x07"))
    text = render((odd,), Style(unicode=False), now_s=NOW_S, left_s=NOW_S)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.replace("\ufffd", "").isascii()


# --- the file ----------------------------------------------------------------------------------------------


class Recorded:
    """An agent's state directory."""

    def __init__(self, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state = state
        self.capsys = capsys

    @property
    def path(self) -> Path:
        return self.state / FILE

    def keep(self, *uses: DeviceUsage) -> None:
        History(self.path, Limits()).write(uses, (), NOW_S, by_age=False)

    def run(self, *argv: str) -> tuple[int, str, str]:
        """Exit code, output, complaints."""
        code = main(["history", "--state-dir", str(self.state), *argv])
        return code, *self.capsys.readouterr()

    def pods(self, *argv: str) -> list[str]:
        """UIDs of the pods in the document."""
        code, out, err = self.run("-o", "json", *argv)
        assert (code, err) == (0, "")
        return [one["pod"]["uid"] for one in json.loads(out)["uses"]]


@pytest.fixture
def node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Recorded:
    return Recorded(tmp_path / "state", capsys)


def test_what_runs_comes_first_and_then_what_ended_last(node: Recorded) -> None:
    node.keep(TRAINED, BROKE, RUNS)
    assert node.pods() == ["p-4", "p-2", "p-1"]
    code, out, err = node.run()
    assert (code, err) == (0, "")
    assert out.startswith("3 uses of devices: 1 running, 2 ended, 1 of them")


def test_a_state_directory_that_is_none_is_a_mistake_and_not_an_empty_record(node: Recorded) -> None:
    node.state.write_text("a file")
    assert node.run() == (70, "", f"drahealth: {node.state}/history.sqlite: Not a directory\n")


def test_a_bad_end_is_no_bad_exit_code(node: Recorded) -> None:
    node.keep(BROKE)
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
def test_uses_can_be_chosen(node: Recorded, argv: list[str], uids: list[str]) -> None:
    node.keep(TRAINED, BROKE, RECOVERED, RUNS)
    assert node.pods(*argv) == uids


def test_a_name_that_the_pod_may_have_finds_it(node: Recorded) -> None:
    node.keep(ended(1, pod=PodRef("", "", "p-1"), maybe=("team-a/web-0",)))
    assert node.pods("--pod", "team-a/web-0") == ["p-1"]


def test_what_ended_long_ago_can_be_left_out(node: Recorded) -> None:
    now_s = time.time()
    late, early = (UsageEnd(Ending.RELEASED, now_s - ago, now_s - ago, 1.0) for ago in (60, 7200))
    node.keep(a_use(1, ended=early), a_use(2, ended=late), RUNS)
    assert node.pods("--since", "1h") == ["p-4", "p-2"]
    assert node.run("--since", "1 hour")[0] == 64


def test_a_table_has_the_newest_and_says_how_many_more_there_are(node: Recorded) -> None:
    node.keep(*(ended(number) for number in range(100)))
    _, out, _ = node.run()
    assert "the newest 40 of 100 uses" in out
    assert "60 uses: --all shows them" in out
    assert "train-59 " not in out
    _, out, _ = node.run("--all")
    assert "train-0 " in out
    assert len(node.pods()) == 100


def test_a_name_of_nothing_is_a_mistake_with_a_suggestion(node: Recorded) -> None:
    node.keep(TRAINED)
    assert node.run("--pod", "team-a/trian-1") == (
        64,
        "",
        "drahealth: of pod 'team-a/trian-1' nothing is recorded; did you mean 'team-a/train-1'?\n",
    )


def test_where_nothing_is_recorded_it_says_where_it_looked(node: Recorded) -> None:
    code, out, err = node.run()
    assert (code, err) == (0, "")
    assert out.startswith("nothing is recorded\n")
    assert str(node.path) in out
    assert not node.state.exists()
    assert node.pods() == []


def test_nothing_that_was_chosen_is_no_empty_table(node: Recorded) -> None:
    node.keep(TRAINED)
    assert node.run("--bad") == (0, "nothing of that is recorded\n", "")


def test_programs_get_every_field(node: Recorded) -> None:
    node.keep(BROKE)
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
    }


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.write_bytes(b"scribble" * 1000), "is not understood: file is not a database"),
        (os.mkfifo, "is no regular file"),
        (os.mkdir, "is no regular file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_left_alone(node: Recorded, make: Any, why: str) -> None:
    node.state.mkdir()
    make(node.path)
    code, out, err = node.run()
    assert (code, out) == (70, "")
    assert err == f"drahealth: {node.path}: {why}\n"
    assert [one.name for one in node.state.iterdir()] == [FILE]


@pytest.fixture
def nobody(node: Recorded) -> Iterator[Recorded]:
    """A record that this user may not read, whoever runs the tests."""
    node.keep(TRAINED)
    node.path.chmod(0)
    before = os.geteuid()
    if before == 0:
        node.state.chmod(0o700)
        os.seteuid(65534)
    yield node
    os.seteuid(before)


def test_what_this_user_may_not_read_is_77_and_named(nobody: Recorded) -> None:
    code, out, err = nobody.run()
    assert (code, out) == (77, "")
    assert err == f"drahealth: {nobody.path}: Permission denied\n"


# --- explain -----------------------------------------------------------------------------------------------


@pytest.fixture
def kubelet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Node:
    node = Node(tmp_path, capsys)
    History(node.state / FILE, Limits()).write((TRAINED, BROKE, RUNS), (), NOW_S, by_age=False)
    node.prepared(prepared_claim("other", "gpu-2", pods=["u-other"]))
    return node


@pytest.mark.parametrize(
    "words", [("pod", "team-a/train-2"), ("pod", "p-2"), ("claim", "c-2"), ("gpu.example.com/node-1/gpu-1",)]
)
def test_what_is_gone_is_explained_from_the_record(kubelet: Node, words: tuple[str, ...]) -> None:
    code, out, err = kubelet.explain(*words)
    number = 1 if words[-1].endswith("gpu-1") else 2
    assert (code, err) == (0 if number == 1 else 2, "")
    assert out.startswith("nobody knows it any more; it was recorded:\n")
    assert f"team-a/train-{number}" in out
    assert "history: 3 uses of devices" in out


def test_a_device_is_explained_with_those_who_had_it_before(kubelet: Node) -> None:
    _, document = kubelet.document("gpu.example.com/node-1/gpu-2")
    assert [one["pod"]["uid"] for one in document["ended"]] == ["p-2"]
    _, out, _ = kubelet.explain("gpu.example.com/node-1/gpu-2")
    assert "\nbefore:\n" in out
    assert "gpu.xid.79: 1 time" in out


def test_a_pod_that_is_there_is_explained_as_it_is_now(kubelet: Node) -> None:
    listed = listing(("train-2", "other", ["gpu-2"]))
    with kubelet.sockets(listed, pods_answer()):
        _, document = kubelet.document("pod", "team-a/train-2")
    assert document["ended"] == []
    assert [one["name"] for one in document["pods"]] == ["train-2"]


@pytest.mark.parametrize("words", [("pod", "p-2"), ("claim", "c-2")])
def test_a_pod_that_failed_and_is_there_still_is_explained_with_its_end(
    kubelet: Node, words: tuple[str, ...]
) -> None:
    """The device may be well again by now."""
    kubelet.prepared(prepared_claim("gpus", "gpu-2", uid="c-2", pods=["p-2"]))
    _, document = kubelet.document(*words)
    assert [one["pod"]["uid"] for one in document["ended"]] == ["p-2"]
    _, out, _ = kubelet.explain(*words)
    assert "\nbefore:\n" in out


def test_a_record_that_cannot_be_read_costs_what_it_would_have_said(kubelet: Node) -> None:
    (kubelet.state / FILE).write_bytes(b"scribble" * 1000)
    code, document = kubelet.document("gpu.example.com/node-1/gpu-2")
    assert code == 3
    (account,) = (one for one in document["sources"] if one["source"] == "history")
    assert account["costs"] == "not known who used devices before"
    assert "is not understood" in account["why"]


def test_a_use_is_written_and_read_as_one(node: Recorded) -> None:
    node.keep(TRAINED)
    node.keep(replace(TRAINED, owner="Job other"))
    assert node.pods() == ["p-1"]

"""``drahealth explain`` and ``audit`` by a user who may read little: what it may not, and why, is said."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from explain_node import Node, pod_object, prepared_claim

from agent.prepare.ledger import PrepareLedger
from agent.serve.kubelet import podresources, pods_api

AS_NOBODY = """
import contextlib, difflib, os, sys
from agent.cli.main import main
with open(os.devnull, "w") as none, contextlib.redirect_stdout(none), contextlib.redirect_stderr(none):
    main(sys.argv[1:])  # imports all: the interpreter's own files may be root's
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(sys.argv[1:]))
"""
DENIED = "Permission denied"
SOCKETS = (podresources.SOCKET, pods_api.SOCKET)


class Said(NamedTuple):
    """What a command said."""

    code: int
    out: str
    err: str


def nobody(verb: str, *argv: str) -> Said:
    """The command, run by nobody."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    run = [sys.executable, "-c", AS_NOBODY, verb, *argv]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def node(capsys: pytest.CaptureFixture[str]) -> Iterator[Node]:
    """Files and sockets as the kubelet and the agent have them: root's alone. Cgroups are for everybody."""
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory, ExitStack() as stack:
        Path(directory).chmod(0o755)
        node = Node(Path(directory), capsys)
        node.prepared(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
        node.believes("Unhealthy", "gpu-0")
        node.remembers(PrepareLedger(), time.time())
        node.run_dir.mkdir()
        for path in (node.run_dir / "agent.sock", *(node.kubelet / one for one in SOCKETS)):
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(path))
            path.chmod(0o660)
        for path in (*node.kubelet.glob("dra_*"), node.kubelet / "plugins"):
            path.chmod(path.stat().st_mode & ~0o077)
        node.runs("u-1")
        yield node


def test_what_is_not_known_for_want_of_permission_is_no_mistake_of_the_callers(node: Node) -> None:
    said = nobody("explain", "gpu-0", *node.places)
    assert (said.code, said.out) == (77, "")
    assert said.err.startswith("drahealth: no device 'gpu-0' is known\n")
    for source, path in {
        "agent": node.run_dir / "agent.sock",
        "checkpoint": node.kubelet / "dra_manager_state",
        "health-state": node.kubelet / "dra_health_state",
        "podresources": node.kubelet / podresources.SOCKET,
        "pods-api": node.kubelet / pods_api.SOCKET,
        "prepares": node.kubelet / "plugins",
        "taints": node.kubelet / "plugins",
    }.items():
        (line,) = (line for line in said.err.splitlines() if line.startswith(f"  not to be had: {source}: "))
        assert str(path) in line
        assert DENIED in line


def test_a_directory_that_may_not_be_entered_is_not_a_node_without_a_kubelet(node: Node) -> None:
    node.kubelet.chmod(0o700)
    (node.cgroups / "kubepods").rename(node.cgroups / "none")
    said = nobody("explain", "gpu-0", *node.places)
    assert (said.code, said.out) == (77, "")
    assert said.err.startswith("drahealth: nobody says anything:\n")
    assert f"  checkpoint: {node.kubelet / 'dra_manager_state'}: {DENIED}" in said.err


def test_what_may_be_read_is_told_beside_what_may_not(node: Node) -> None:
    said = nobody("explain", "pod", "u-1", *node.places)
    assert (said.code, said.err) == (3, "")
    assert "pod u-1  name not known, processes of it run\n" in said.out
    assert "no claim of it is known\n" in said.out
    assert said.out.count(DENIED) == 7


def test_a_name_that_several_have_stays_the_callers_mistake(node: Node) -> None:
    two = pod_object("train"), pod_object("train", uid="u-2")
    two[1]["metadata"]["namespace"] = "team-b"
    said = nobody("explain", "pod", "train", "--pods", node.saved("p.json", *two), *node.places)
    assert (said.code, said.out) == (64, "")
    assert said.err == "drahealth: 'train' is 2 pods: team-a/train, team-b/train; say which\n"


def test_a_file_that_was_named_and_may_not_be_read_is_the_only_complaint(node: Node) -> None:
    saved = Path(node.saved("p.json", pod_object("train", uid="u-1")))
    saved.chmod(0o600)
    for verb in (["explain", "pod", "train"], ["audit"]):
        said = nobody(*verb, "--pods", str(saved))
        assert said == Said(77, "", f"drahealth: {saved}: {DENIED}\n")


def test_an_audit_without_pods_says_that_it_may_not_ask_for_them(node: Node) -> None:
    said = nobody("audit", "--kubelet-dir", str(node.kubelet), "--cgroupfs-root", str(node.cgroups))
    assert (said.code, said.err) == (3, "")
    assert f"no pods  {node.kubelet / pods_api.SOCKET}: {DENIED}\n" in said.out


def test_an_audit_says_what_it_may_not_read_of_the_kubelets(node: Node) -> None:
    (node.kubelet / "cpu_manager_state").write_text("{}")
    (node.kubelet / "cpu_manager_state").chmod(0o600)
    (node.cgroups / "cgroup.controllers").write_text("cpu memory\n")
    pods = node.saved("p.json", pod_object("pod-u-1", "gpus", uid="u-1"))
    places = ("--kubelet-dir", str(node.kubelet), "--cgroupfs-root", str(node.cgroups))
    said = nobody("audit", "--pods", pods, *places)
    assert said.err == ""
    assert f"{node.kubelet / 'cpu_manager_state'}: {DENIED}" in said.out

"""``drahealth explain`` and ``audit`` as an unprivileged user: sources without permission are named."""

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
from other_user import skip_unless_user_can_change
from patience import PATIENCE_S

from agent.prepare.prepare_ledger import PrepareLedger
from agent.serve.kubelet import client, pods_api

UNPRIVILEGED = """
import contextlib, difflib, os, sys
from agent.cli.main import main
with open(os.devnull, "w") as none, contextlib.redirect_stdout(none), contextlib.redirect_stderr(none):
    main(sys.argv[1:])  # import everything first: the interpreter's files may be readable by root only
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(sys.argv[1:]))
"""
DENIED = "Permission denied"
SOCKETS = (client.PODRESOURCES_SOCKET, pods_api.SOCKET)


class Output(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def run_unprivileged(verb: str, *argv: str) -> Output:
    """Run the command as user 65534."""
    skip_unless_user_can_change()
    run = [sys.executable, "-c", UNPRIVILEGED, verb, *argv]
    while True:
        done = subprocess.run(run, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
        if "no answer within" not in done.stdout + done.stderr:  # a busy machine needs more than five seconds
            return Output(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def node(capsys: pytest.CaptureFixture[str]) -> Iterator[Node]:
    """Files and sockets of the kubelet and the agent, for root only; every user may read the cgroups."""
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory, ExitStack() as stack:
        Path(directory).chmod(0o755)
        node = Node(Path(directory), capsys)
        node.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
        node.health_state("Unhealthy", "gpu-0")
        node.driver_stores(PrepareLedger(), time.time())
        node.run_dir.mkdir()
        for path in (node.run_dir / "agent.sock", *(node.kubelet / found_path for found_path in SOCKETS)):
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(path))
            path.chmod(0o660)
        for path in (*node.kubelet.glob("dra_*"), node.kubelet / "plugins"):
            path.chmod(path.stat().st_mode & ~0o077)
        node.runs("u-1")
        yield node


def test_unknown_name_with_unreadable_sources_exits_77(node: Node) -> None:
    output = run_unprivileged("explain", "gpu-0", *node.flags)
    assert (output.code, output.out) == (77, "")
    assert output.err.startswith("drahealth: no device 'gpu-0' is known\n")
    for source, path in {
        "agent": node.run_dir / "agent.sock",
        "checkpoint": node.kubelet / "dra_manager_state",
        "health-state": node.kubelet / "dra_health_state",
        "podresources": node.kubelet / client.PODRESOURCES_SOCKET,
        "pods-api": node.kubelet / pods_api.SOCKET,
        "prepares": node.kubelet / "plugins",
        "taints": node.kubelet / "plugins",
    }.items():
        (line,) = (
            line for line in output.err.splitlines() if line.startswith(f"  not available: {source}: ")
        )
        assert str(path) in line
        assert DENIED in line


def test_unreadable_kubelet_directory_exits_77(node: Node) -> None:
    node.kubelet.chmod(0o700)
    (node.cgroups / "kubepods").rename(node.cgroups / "none")
    output = run_unprivileged("explain", "gpu-0", *node.flags)
    assert (output.code, output.out) == (77, "")
    assert output.err.startswith("drahealth: no source on this node answered:\n")
    assert f"  checkpoint: {node.kubelet / 'dra_manager_state'}: {DENIED}" in output.err


def test_readable_sources_are_shown_with_unreadable_ones(node: Node) -> None:
    output = run_unprivileged("explain", "pod", "u-1", *node.flags)
    assert (output.code, output.err) == (3, "")
    assert "pod u-1  name not known, has running processes\n" in output.out
    assert "no claim of the pod is known\n" in output.out
    assert output.out.count(DENIED) == 7


def test_ambiguous_name_exits_64(node: Node) -> None:
    two = pod_object("train"), pod_object("train", uid="u-2")
    two[1]["metadata"]["namespace"] = "team-b"
    output = run_unprivileged(
        "explain", "pod", "train", "--pods", node.write_objects("p.json", *two), *node.flags
    )
    assert (output.code, output.out) == (64, "")
    assert output.err == "drahealth: 'train' matches 2 pods: team-a/train, team-b/train; use a full name\n"


def test_unreadable_pods_file_is_the_only_error(node: Node) -> None:
    saved = Path(node.write_objects("p.json", pod_object("train", uid="u-1")))
    saved.chmod(0o600)
    for verb in (["explain", "pod", "train"], ["audit"]):
        output = run_unprivileged(*verb, "--pods", str(saved))
        assert output == Output(77, "", f"drahealth: {saved}: {DENIED}\n")


def test_segment_in_a_closed_directory_is_the_only_error(tmp_path: Path) -> None:
    segment = tmp_path / "record-00000001.drahrec"
    segment.touch()
    tmp_path.chmod(0o700)
    output = run_unprivileged("replay", str(segment))
    assert output == Output(70, "", f"drahealth: record file {segment}: cannot be read: {DENIED}\n")


def test_audit_without_permission_for_the_pods_api_names_it(node: Node) -> None:
    output = run_unprivileged(
        "audit", "--kubelet-dir", str(node.kubelet), "--cgroupfs-root", str(node.cgroups)
    )
    assert (output.code, output.err) == (3, "")
    assert f"no pods  {node.kubelet / pods_api.SOCKET}: {DENIED}\n" in output.out


def test_audit_names_an_unreadable_kubelet_file(node: Node) -> None:
    (node.kubelet / "cpu_manager_state").write_text("{}")
    (node.kubelet / "cpu_manager_state").chmod(0o600)
    (node.cgroups / "cgroup.controllers").write_text("cpu memory\n")
    pods = node.write_objects("p.json", pod_object("pod-u-1", "gpus", uid="u-1"))
    roots = ("--kubelet-dir", str(node.kubelet), "--cgroupfs-root", str(node.cgroups))
    output = run_unprivileged("audit", "--pods", pods, *roots)
    assert output.err == ""
    assert f"{node.kubelet / 'cpu_manager_state'}: {DENIED}" in output.out

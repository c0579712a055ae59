"""Process facts for ``scan``: selected processes; processes that vanish or hide are no error."""

import os
import time
from pathlib import Path

import psutil
import pytest
from named_process import named_process

from agent.sources.gpu_os_facts import process_role, read_node_processes


@pytest.mark.parametrize(
    ("name", "cmdline", "role"),
    [
        ("kubelet", [], "kubelet"),
        ("containerd", ["/usr/bin/containerd"], "containerd"),
        ("containerd-shim", ["containerd-shim-runc-v2"], ""),
        ("drahealth", ["/usr/bin/python3", "/usr/local/bin/drahealth", "run"], "drahealth"),
        ("python3", ["/usr/bin/python3", "-m", "agent", "run", "--driver", "x"], "drahealth"),
        ("python3", ["python3", "-u", "/opt/bin/drahealth", "run"], "drahealth"),
        ("python3", ["python3", "/usr/local/bin/drahealth", "scan"], ""),
        ("python3", ["python3", "train.py", "run"], ""),
        ("python3", [], ""),
    ],
)
def test_process_role_depends_on_name_and_command_line(name, cmdline, role):
    assert process_role(name, cmdline) == role


@pytest.fixture
def runtime(tmp_path):
    """A process named containerd, which runs while its standard input is open.

    It has not the kubelet's name: an audit of another test would take it for this node's.
    """
    with named_process(tmp_path, "containerd") as process:
        yield process


def test_process_is_found_with_its_facts(runtime):
    (facts,) = (p for p in read_node_processes(Path("/proc")) if p.pid == runtime.pid)
    assert facts.name == "containerd"
    assert facts.rss_bytes > 0
    assert facts.threads == 1
    assert 0 <= facts.cpu_s < 60
    assert abs(facts.since_s - time.time()) < 60


def test_zombie_is_left_out(runtime):
    runtime.kill()
    os.waitid(os.P_PID, runtime.pid, os.WEXITED | os.WNOWAIT)
    assert runtime.pid not in [p.pid for p in read_node_processes(Path("/proc"))]


def test_other_procfs_is_read_without_changing_psutil(tmp_path):
    (tmp_path / "stat").write_text("btime 1\n")
    (tmp_path / "99999").mkdir()  # a process that vanished after its directory was listed
    assert read_node_processes(tmp_path) == []
    assert psutil.PROCFS_PATH == "/proc"


def test_missing_procfs_has_no_processes(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path, tmp_path / "file", tmp_path / "none"):
        assert read_node_processes(root) == []


def test_own_process_is_not_listed_as_an_agent():
    assert os.getpid() not in [p.pid for p in read_node_processes(Path("/proc"))]

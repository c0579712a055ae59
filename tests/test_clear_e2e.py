"""``drahealth clear`` with a real agent and the simulated NVML: clears, refusals, callers and restarts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from agents import LATE_ANSWERS, short_tmp
from other_user import skip_unless_user_can_change
from patience import PATIENCE_S
from scenarios.row import OK, SICK, Row
from scenarios.stage import Stage
from scenarios.steps import FAULTS
from wire.serving import eventually

DRIVER = "gpu.example.com"
REPETITIONS = 10
GPUS = Row("a repair", (), gpus=2, settings={"stream": {"heartbeat": "10s"}})  # no answer waits for it
PATIENT = f"""
import sys
from agent.cli.main import main
from agent.serve.agent_api import client
client.STATUS_TIMEOUT_S = {PATIENCE_S}
sys.exit(main(sys.argv[1:]))
"""
"""Command that waits for a late answer: after it, a second request would find no fault to clear."""
UNPRIVILEGED = """
import os, sys
from agent.cli.main import main
main(["clear", "--help"])
import asyncio, agent.serve.agent_api.client
agent.serve.agent_api.client.STATUS_TIMEOUT_S = 60
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(sys.argv[1:]))
"""
__all__ = ["short_tmp"]


class Output(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str
    pid: int


@pytest.fixture
def stage(short_tmp: Path) -> Iterator[Stage]:
    stage = Stage(GPUS, short_tmp)
    stage.start()
    yield stage
    stage.end()


def run(stage: Stage, verb: str, *argv: str, program: tuple[str, ...] = ("-c", PATIENT)) -> Output:
    """Run a command against the agent of the stage, again while the agent is too busy to answer in time."""
    command = [sys.executable, *program, verb, *argv, "--runtime-dir", str(stage.directory / "run")]
    for _ in range(REPETITIONS):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=stage.agent.environ
        ) as process:
            out, err = process.communicate(timeout=2 * PATIENCE_S)
        if not any(error in err for error in LATE_ANSWERS):
            break
    return Output(process.returncode, out, err, process.pid)


def break_gpu(stage: Stage, number: int = 0, code: int = 79) -> None:
    """Let a GPU have an XID that only a reboot or an operator ends."""
    stage.machine.fake.send(f"gpu {number} xid {code}")
    stage.clients.see([f"gpu-{number}"], SICK, f"gpu.xid.{code}: ")


def explain_device(stage: Stage, device: str) -> dict[str, Any]:
    """Return the device of ``drahealth explain -o json``, with the agent's verdict."""
    found: list[dict[str, Any]] = []

    def has_verdict() -> bool:
        """Return whether the agent answered in the two seconds that the command waits."""
        found[:] = json.loads(run(stage, "explain", device, "-o", "json").out)["devices"]
        return [entry["verdict"]["source"] for entry in found if entry["verdict"]] == ["agent"]

    eventually(has_verdict, lambda: f"the agent's verdict on {device} in {found}")
    return dict(found[0])


def test_cleared_gpu_is_healthy_with_a_record(stage: Stage) -> None:
    break_gpu(stage)
    done = run(stage, "clear", "gpu-0", "--code", "gpu.xid.79")
    assert done[:3] == (0, "gpu-0: fault gpu.xid.79 cleared\n", "")
    stage.clients.see(["gpu-0"], OK, "")
    login_file = Path("/proc/self/loginuid")
    login = login_file.read_text() if login_file.exists() else "4294967295"
    uid, login_uid = os.geteuid(), None if login == "4294967295" else int(login)
    by = f"uid {uid} (pid {done.pid}{'' if login_uid is None else f', login uid {login_uid}'})"
    stage.agent.wait_for_log(f"gpu-0: fault gpu.xid.79 cleared by {by}")
    (record,) = explain_device(stage, "gpu-0")["cleared"]
    assert record.pop("at").endswith("Z")
    expected = {"device": "gpu-0", "code": "gpu.xid.79", "uid": uid, "pid": done.pid, "loginUID": login_uid}
    assert record == expected
    texts = [""]

    def is_explained() -> bool:
        texts.append(run(stage, "explain", "gpu-0").out)
        return by in texts[-1]

    eventually(is_explained, lambda: f"{by} in {texts[-1]}")
    assert "gpu.xid.79" in texts[-1]


def test_json_output_lists_each_cleared_fault(stage: Stage) -> None:
    for code in (79, 62):
        stage.machine.fake.send(f"gpu 1 xid {code}")
        stage.clients.know(["gpu-1"], SICK, f"gpu.xid.{code}: ")
    done = run(stage, "clear", "gpu-1", "-o", "json")
    document = json.loads(done.out)
    assert (done.code, document["apiVersion"]) == (0, "drahealth/v1")
    faults = sorted((fault["device"], fault["code"]) for fault in document["cleared"])
    assert faults == [("gpu-1", "gpu.xid.62"), ("gpu-1", "gpu.xid.79")]


@pytest.mark.parametrize("kill", [False, True])
def test_restart_keeps_gpu_cleared_until_fault_recurs(stage: Stage, kill: bool) -> None:
    break_gpu(stage)
    assert run(stage, "clear", "gpu-0").code == 0
    path = stage.directory / FAULTS
    stage.clients.until(lambda: path.exists() and '"cleared"' in path.read_text(), "the record on disk")
    stage.stop(kill=kill)
    stage.start()
    stage.clients.until(
        lambda: [fault.code for fault in stage.clients.report.cleared] == ["gpu.xid.79"], "it"
    )
    (record,) = explain_device(stage, "gpu-0")["cleared"]
    assert record["code"] == "gpu.xid.79"
    causes = explain_device(stage, "gpu-0")["verdict"]["causes"]
    assert "gpu.xid.79" not in [cause["code"] for cause in causes]
    break_gpu(stage)


def test_lost_gpu_is_not_cleared_until_it_is_back(stage: Stage) -> None:
    break_gpu(stage)
    stage.machine.fake.send("gpu 0 lost")
    stage.clients.know(["gpu-0"], SICK, "gpu.lost: ")
    done = run(stage, "clear", "gpu-0")
    assert (done.code, done.out) == (75, "")
    assert done.err.startswith("drahealth: gpu-0: a reading still shows a fault: gpu.lost: ")
    assert "cleared by" not in stage.log()


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["gpu-9"], "no device 'gpu-9' is known; did you mean 'gpu-"),
        (["gpu-1"], "gpu-1 has no latched fault"),
        (["gpu-0", "--code", "gpu.xid.62"], "gpu-0 has no latched fault gpu.xid.62"),
        (["gpu-0", "--code", "gpu.lost"], "gpu-0: gpu.lost is not latched: a reading decides it"),
        ([""], "the value after 'clear' is empty"),
        (["g" * 1025], "device has 1025 characters"),
        (["gpu-\udcff"], "no device 'gpu-\ufffd' is known"),
    ],
)
def test_wrong_request_is_refused_with_the_reason(stage: Stage, argv: list[str], text: str) -> None:
    break_gpu(stage)
    done = run(stage, "clear", *argv)
    assert (done.code, done.out) == (64, "")
    assert text in done.err
    assert "gpu.xid.79" in [cause["code"] for cause in explain_device(stage, "gpu-0")["verdict"]["causes"]]


def test_other_user_may_not_clear_faults(stage: Stage) -> None:
    skip_unless_user_can_change()
    break_gpu(stage)
    for path in (stage.directory, stage.directory / "run"):
        path.chmod(0o755)
    stage.agent.agent_socket.chmod(0o666)
    done = run(stage, "clear", "gpu-0", program=("-c", UNPRIVILEGED))
    assert done.code == 77
    assert "uid 65534 may not clear faults; run the command as root" in done.err
    assert "cleared by" not in stage.log()


def test_missing_agent_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agent", "clear", "gpu-0", "--runtime-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, "is the agent running?" in done.stderr) == (69, True)

"""``drahealth explain`` as a process with a real agent: an unhealthy declared device affects its pod."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from agents import DRIVER, HEALTHY, UNHEALTHY, Agent, PlainSysfs, short_tmp, wait_for_health
from explain_node import Node as Kubelet
from explain_node import claim_object, podresources_answer, pods_answer, reservations
from kubelet_files import claim, device
from patience import PATIENCE_S
from wire.serving import Serving, unhealthy

__all__ = ["short_tmp"]

NODE = "node-1"
PAGES = "huge-2mi-0"
OTHER = "cpu.example.com"
DECLARED = f"""
version = 1

[[device]]
name = "{PAGES}"
kind = "hugepages"
size = "2Mi"
pages = 8
numa = 0
"""


@pytest.fixture
def node(short_tmp: Path, capsys: pytest.CaptureFixture[str]) -> Kubelet:
    """A kubelet that has prepared the device for a pod."""
    kubelet = Kubelet(short_tmp, capsys)
    allocated = {
        DRIVER: {"Devices": [{**device(PAGES, pool=NODE), "CDIDeviceIDs": [f"{DRIVER}/device={PAGES}"]}]}
    }
    kubelet.write_checkpoint(claim("c-pages", name="pages", pods=["u-1"], drivers=allocated))
    return kubelet


@pytest.fixture
def agent(node: Kubelet, short_tmp: Path) -> Any:
    """An agent with the driver's declaration."""
    sysfs = PlainSysfs(short_tmp / "sys")
    declarations = node.run_dir / "devices.d"
    declarations.mkdir(parents=True)
    (declarations / f"{DRIVER}.toml").write_text(DECLARED)
    flags = ["--sysfs-root", str(sysfs.root), "--nvml-library", "/nonexistent", "--node-name", NODE]
    flags += ["--driver", OTHER, "--kmsg", "/nonexistent", "--period", "50ms", "--state-dir", str(node.state)]
    with Agent(short_tmp, *flags) as running:
        running.sysfs = sysfs  # type: ignore[attr-defined]
        with running.kubelet() as kubelet:
            wait_for_health(kubelet, PAGES, HEALTHY)
        yield running


def explain(node: Kubelet, *argv: str, flags: Sequence[str] = ()) -> tuple[int, str]:
    """Run the command in a process, again while an answer to it was late; return exit code and output."""
    end_s = time.monotonic() + PATIENCE_S
    while "no answer within" in (found := explain_once(node, *argv, flags=flags))[1]:
        assert time.monotonic() < end_s, found
    return found


def explain_once(node: Kubelet, *argv: str, flags: Sequence[str] = ()) -> tuple[int, str]:
    """Run the command in a process; return exit code and output."""
    run = [sys.executable, "-m", "agent", "explain", *argv, *(flags or node.flags)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def shrink_pool(agent: Any) -> None:
    """Remove pages, and wait until the kubelet gets Unhealthy."""
    with agent.kubelet() as kubelet:
        wait_for_health(kubelet, PAGES, HEALTHY)
        agent.sysfs.resize(3)
        wait_for_health(kubelet, PAGES, UNHEALTHY)


def test_unhealthy_declared_device_names_its_pod(node: Kubelet, agent: Any) -> None:
    name = f"{DRIVER}/{NODE}/{PAGES}"
    with node.sockets(podresources_answer(), pods_answer(("u-1", ["pages"]))):
        assert explain(node, name)[0] == 0
        shrink_pool(agent)
        code, out = explain(node, name)
        by_cdi = explain(node, f"{DRIVER}/device={PAGES}", "-o", "json")
        pod_code, pod = explain(node, "pod", "team-a/pod-u-1")
    assert (code, pod_code) == (2, 2)
    assert out.startswith(f"✖ {name}  Unhealthy for ")
    assert "from the agent\n    mem.hugepages.pool_shrunk: 3 pages of 2mi on NUMA node 0, 8 declared" in out
    assert "    → " in out
    assert f"on socket  same health and message ({agent.health_socket})" in out
    assert "used by 1 pod, through 1 claim\n" in out
    assert "• team-a/pages  team-a/pod-u-1  main" in out
    assert "mem.hugepages.pool_shrunk" in pod
    document = json.loads(by_cdi[1])
    (found,) = document["devices"]
    assert (by_cdi[0], found["severity"]) == (2, "unhealthy")
    assert found["verdict"]["source"] == "agent"
    assert found["told"]["source"] == str(agent.health_socket)
    assert found["told"]["message"] == found["verdict"]["message"]


def test_health_in_the_kubelet_is_shown_next_to_the_sent_one(node: Kubelet, agent: Any) -> None:
    shrink_pool(agent)
    belief = {
        DRIVER: {
            "Devices": {
                f"{NODE}/{PAGES}": {
                    "PoolName": NODE,
                    "DeviceName": PAGES,
                    "Health": "Healthy",
                    "LastUpdated": "2026-11-21T10:00:00Z",
                }
            }
        }
    }
    (node.kubelet / "dra_health_state").write_text(json.dumps(belief))
    code, out = explain(node, f"{NODE}/{PAGES}")
    assert code == 2
    assert f"on socket  same health and message ({agent.health_socket})" in out
    assert "kubelet    Healthy, updated" in out
    assert "; the device is Unhealthy\n" in out


def test_host_device_has_health_and_no_pods(node: Kubelet, agent: Any) -> None:
    code, out = explain(node, "hugepages-2mi-node0", "--claims", node.write_objects("c.json"))
    assert code == 0
    assert out.startswith("● node-1/hugepages-2mi-node0  Healthy for ")
    assert "no known pod uses the device\n" in out


def test_driver_without_declaration_gets_host_device_health(node: Kubelet, agent: Any) -> None:
    """The agent serves the host's devices on the driver's socket, so the claim is of a host device."""
    allocated = {OTHER: {"Devices": [device("cpu-node0", pool=NODE)]}}
    node.write_checkpoint(claim("c-cpu", name="cpus", pods=["u-2"], drivers=allocated))
    code, out = explain(node, "claim", "team-a/cpus", "-o", "json")
    (found,) = json.loads(out)["devices"]
    assert code == 0
    assert (found["driver"], found["name"]) == (OTHER, "cpu-node0")
    assert found["verdict"]["source"] == "agent"
    assert found["told"]["source"] == str(node.run_dir / "drivers" / f"{OTHER}.sock")


def test_host_device_name_finds_the_driver_device_in_use(node: Kubelet, agent: Any) -> None:
    allocated = {OTHER: {"Devices": [device("cpu-node0", pool=NODE)]}}
    node.write_checkpoint(claim("c-cpu", name="cpus", pods=["u-2"], drivers=allocated))
    for name in ("cpu-node0", f"{NODE}/cpu-node0", f"{OTHER}/{NODE}/cpu-node0"):
        code, out = explain(node, name)
        assert code == 0
        assert out.startswith(f"● {OTHER}/{NODE}/cpu-node0  Healthy for ")
        assert "used by 1 pod, through 1 claim\n" in out


def test_driver_socket_replaces_a_missing_agent_socket(node: Kubelet, agent: Any) -> None:
    shrink_pool(agent)
    (node.root / "file").write_text("")
    (node.root / "file").replace(agent.agent_socket)  # a removed socket would be created again
    code, out = explain(node, f"{DRIVER}/{NODE}/{PAGES}")
    assert code == 2
    assert (
        f"from {agent.health_socket}\n    mem.hugepages.pool_shrunk: 3 pages of 2mi on NUMA node 0, 8 declared"  # noqa: E501
        in out
    )
    assert "without  agent: no evidence, advice and times" in out


def test_embedding_driver_is_read_on_its_own_socket(node: Kubelet, agent: Any) -> None:
    shrink_pool(agent)
    plugin = node.kubelet / "plugins" / DRIVER
    (plugin / "drahealth").mkdir(parents=True)
    (plugin / "dra.sock").symlink_to(agent.health_socket)
    elsewhere = ["--runtime-dir", str(node.root / "none")]
    code, out = explain(node, f"{NODE}/{PAGES}", *elsewhere, flags=["--kubelet-dir", str(node.kubelet)])
    assert code == 2
    assert f"from {plugin / 'dra.sock'}\n" in out


def test_socket_of_an_embedding_driver_precedes_that_of_the_agent(node: Kubelet, agent: Any) -> None:
    """Case: the agent also serves the driver's name, and reports host devices on that socket."""
    allocated = {OTHER: {"Devices": [device("gpu-0", pool=NODE)]}}
    node.write_checkpoint(claim("c-gpu", name="gpus", pods=["u-2"], drivers=allocated))
    plugin = node.kubelet / "plugins" / OTHER
    (plugin / "drahealth").mkdir(parents=True)
    with Serving(node.root / "e") as driver:
        (plugin / "dra.sock").symlink_to(driver.health)
        driver.publish(unhealthy("gpu-0", "gpu.xid.79: 1 time")._replace(pool=NODE))
        code, out = explain(node, f"{OTHER}/{NODE}/gpu-0")
    assert code == 2
    assert f"from {plugin / 'dra.sock'}\n    gpu.xid.79: 1 time\n" in out


@contextmanager
def busy_cpus() -> Iterator[None]:
    """Keep all CPUs busy with two processes per CPU for a ``with`` block."""
    with ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


@pytest.mark.slow
def test_agent_with_4096_devices_is_read_on_a_busy_machine(node: Kubelet) -> None:
    """A report that takes seconds to encode, send and decode is no agent that hangs.

    A try may lack it while other tests take all CPUs; ten may not.
    """
    reports = []

    def is_read() -> bool:
        reports.append(explain_once(node, f"{NODE}/device-4095"))
        return "from the agent\n    cpu.offline: CPU 1" in reports[-1][1]

    devices = [unhealthy(f"device-{number}")._replace(pool=NODE) for number in range(4096)]
    with Serving(node.run_dir) as agent_server, busy_cpus():
        agent_server.publish(*devices)
        while not is_read():
            assert len(reports) < 10, reports
    assert reports[-1][0] == 2


def test_foreign_driver_socket_is_not_read(node: Kubelet, agent: Any) -> None:
    plugin = node.kubelet / "plugins" / DRIVER
    plugin.mkdir()
    (plugin / "dra.sock").symlink_to(agent.health_socket)
    elsewhere = ["--runtime-dir", str(node.root / "none")]
    code, out = explain(node, f"{NODE}/{PAGES}", *elsewhere, flags=["--kubelet-dir", str(node.kubelet)])
    assert code == 3
    assert str(plugin / "dra.sock") not in out


def test_reserved_claim_may_affect_its_pod(node: Kubelet, agent: Any) -> None:
    shrink_pool(agent)
    other = claim_object("later", reserved_for=reservations("u-9"))
    results = [{"request": "r", "driver": DRIVER, "pool": NODE, "device": PAGES}]
    other["status"]["allocation"] = {"devices": {"results": results}}
    code, out = explain(node, f"{NODE}/{PAGES}", "--claims", node.write_objects("c.json", other))
    assert code == 2
    assert "used by 1 pod, 1 more may use the device, through 2 claims\n" in out
    assert "? team-a/later  team-a/pod-u-9" in out


def test_claim_with_unknown_devices_makes_its_pod_unknown(node: Kubelet, agent: Any) -> None:
    assert explain(node, "pod", "u-1")[0] == 0
    allocated = {DRIVER: {"Devices": [device(PAGES, pool=NODE)]}}
    mine = claim("c-pages", name="pages", pods=["u-1"], drivers=allocated)
    node.write_checkpoint(
        mine, claim("c-more", name="more", pods=["u-1"], drivers={OTHER: {"Devices": None}})
    )
    code, out = explain(node, "pod", "u-1")
    assert code == 3
    assert f"waits for  {OTHER}: no device yet\n" in out

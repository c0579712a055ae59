"""``drahealth explain`` as a process, beside a real agent: a declared device falls ill, its pod is named."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agents import DRIVER, HEALTHY, UNHEALTHY, Agent, PlainSysfs, hear_health, short_tmp
from explain_node import Node as Kubelet
from explain_node import claim_object, listing, pods_answer, reserved
from kubelet_files import claim, device
from patience import PATIENCE_S

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
    """A kubelet that prepared the device for a pod."""
    kubelet = Kubelet(short_tmp, capsys)
    given = {
        DRIVER: {"Devices": [{**device(PAGES, pool=NODE), "CDIDeviceIDs": [f"{DRIVER}/device={PAGES}"]}]}
    }
    kubelet.prepared(claim("c-pages", name="pages", pods=["u-1"], drivers=given))
    return kubelet


@pytest.fixture
def agent(node: Kubelet, short_tmp: Path) -> Any:
    """The agent, and the driver's declaration."""
    sysfs = PlainSysfs(short_tmp / "sys")
    declarations = node.run_dir / "devices.d"
    declarations.mkdir(parents=True)
    (declarations / f"{DRIVER}.toml").write_text(DECLARED)
    flags = ["--sysfs-root", str(sysfs.root), "--nvml-library", "/nonexistent", "--node-name", NODE]
    flags += ["--driver", OTHER, "--kmsg", "/nonexistent", "--period", "50ms", "--state-dir", str(node.state)]
    with Agent(short_tmp, *flags) as running:
        running.sysfs = sysfs  # type: ignore[attr-defined]
        with running.kubelet() as kubelet:
            hear_health(kubelet, PAGES, HEALTHY)
        yield running


def explain(node: Kubelet, *argv: str, places: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code and output of the command in a process of its own."""
    run = [sys.executable, "-m", "agent", "explain", *argv, *(places or node.places)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def fall_ill(agent: Any) -> None:
    """Somebody takes pages away, and the kubelet is told."""
    with agent.kubelet() as kubelet:
        hear_health(kubelet, PAGES, HEALTHY)
        agent.sysfs.resize(3)
        hear_health(kubelet, PAGES, UNHEALTHY)


def test_a_declared_device_that_falls_ill_names_its_pod(node: Kubelet, agent: Any) -> None:
    name = f"{DRIVER}/{NODE}/{PAGES}"
    with node.sockets(listing(), pods_answer(("u-1", ["pages"]))):
        assert explain(node, name)[0] == 0
        fall_ill(agent)
        code, out = explain(node, name)
        by_cdi = explain(node, f"{DRIVER}/device={PAGES}", "-o", "json")
        pod_code, pod = explain(node, "pod", "team-a/pod-u-1")
    assert (code, pod_code) == (2, 2)
    assert out.startswith(f"✖ {name}  Unhealthy for ")
    assert "says the agent\n    mem.hugepages.pool_shrunk: 3 pages of 2mi on node 0, 8 declared" in out
    assert "    → " in out
    assert f"told  the same ({agent.health_socket})" in out
    assert "used by 1 pod, through 1 claim\n" in out
    assert "• team-a/pages  team-a/pod-u-1  main" in out
    assert "mem.hugepages.pool_shrunk" in pod
    document = json.loads(by_cdi[1])
    (found,) = document["devices"]
    assert (by_cdi[0], found["severity"]) == (2, "unhealthy")
    assert found["verdict"]["source"] == "agent"
    assert found["told"]["source"] == str(agent.health_socket)
    assert found["told"]["message"] == found["verdict"]["message"]


def test_what_the_kubelet_believes_stands_beside_what_it_is_told(node: Kubelet, agent: Any) -> None:
    fall_ill(agent)
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
    assert f"told     the same ({agent.health_socket})" in out
    assert "kubelet  believes Healthy, heard" in out
    assert "; it is Unhealthy\n" in out


def test_a_device_of_the_host_has_a_verdict_and_nobody_who_uses_it(node: Kubelet, agent: Any) -> None:
    code, out = explain(node, "hugepages-2mi-node0", "--claims", node.saved("c.json"))
    assert code == 0
    assert out.startswith("● node-1/hugepages-2mi-node0  Healthy for ")
    assert "nobody is known to use it\n" in out


def test_a_driver_that_has_declared_nothing_is_told_of_the_hosts_own(node: Kubelet, agent: Any) -> None:
    """Its socket serves them, so a claim of its device is a claim of the host's one of that name."""
    given = {OTHER: {"Devices": [device("cpu-node0", pool=NODE)]}}
    node.prepared(claim("c-cpu", name="cpus", pods=["u-2"], drivers=given))
    code, out = explain(node, "claim", "team-a/cpus", "-o", "json")
    (found,) = json.loads(out)["devices"]
    assert code == 0
    assert (found["driver"], found["name"]) == (OTHER, "cpu-node0")
    assert found["verdict"]["source"] == "agent"
    assert found["told"]["source"] == str(node.run_dir / "drivers" / f"{OTHER}.sock")


def test_who_names_a_device_of_the_host_means_the_driver_that_uses_it(node: Kubelet, agent: Any) -> None:
    given = {OTHER: {"Devices": [device("cpu-node0", pool=NODE)]}}
    node.prepared(claim("c-cpu", name="cpus", pods=["u-2"], drivers=given))
    for word in ("cpu-node0", f"{NODE}/cpu-node0", f"{OTHER}/{NODE}/cpu-node0"):
        code, out = explain(node, word)
        assert code == 0
        assert out.startswith(f"● {OTHER}/{NODE}/cpu-node0  Healthy for ")
        assert "used by 1 pod, through 1 claim\n" in out


def test_the_drivers_socket_is_enough_where_the_agents_own_is_not_there(node: Kubelet, agent: Any) -> None:
    fall_ill(agent)
    agent.agent_socket.unlink()
    code, out = explain(node, f"{DRIVER}/{NODE}/{PAGES}")
    assert code == 2
    assert (
        f"says {agent.health_socket}\n    mem.hugepages.pool_shrunk: 3 pages of 2mi on node 0, 8 declared"
        in out
    )
    assert "without  agent: no evidence, no advice, since when" in out


def test_a_driver_that_embeds_is_asked_on_its_own_socket(node: Kubelet, agent: Any) -> None:
    fall_ill(agent)
    plugin = node.kubelet / "plugins" / DRIVER
    (plugin / "drahealth").mkdir(parents=True)
    (plugin / "dra.sock").symlink_to(agent.health_socket)
    elsewhere = ["--runtime-dir", str(node.root / "none")]
    code, out = explain(node, f"{NODE}/{PAGES}", *elsewhere, places=["--kubelet-dir", str(node.kubelet)])
    assert code == 2
    assert f"says {plugin / 'dra.sock'}\n" in out


def test_a_driver_that_is_none_of_ours_is_left_alone(node: Kubelet, agent: Any) -> None:
    plugin = node.kubelet / "plugins" / DRIVER
    plugin.mkdir()
    (plugin / "dra.sock").symlink_to(agent.health_socket)
    elsewhere = ["--runtime-dir", str(node.root / "none")]
    code, out = explain(node, f"{NODE}/{PAGES}", *elsewhere, places=["--kubelet-dir", str(node.kubelet)])
    assert code == 3
    assert str(plugin / "dra.sock") not in out


def test_claims_that_are_only_promised_may_hurt(node: Kubelet, agent: Any) -> None:
    fall_ill(agent)
    other = claim_object("later", reserved_for=reserved("u-9"))
    results = [{"request": "r", "driver": DRIVER, "pool": NODE, "device": PAGES}]
    other["status"]["allocation"] = {"devices": {"results": results}}
    code, out = explain(node, f"{NODE}/{PAGES}", "--claims", node.saved("c.json", other))
    assert code == 2
    assert "used by 1 pod, 1 other may, through 2 claims\n" in out
    assert "? team-a/later  team-a/pod-u-9" in out


def test_a_claim_whose_devices_nobody_knows_makes_its_pod_unknown(node: Kubelet, agent: Any) -> None:
    assert explain(node, "pod", "u-1")[0] == 0
    given = {DRIVER: {"Devices": [device(PAGES, pool=NODE)]}}
    mine = claim("c-pages", name="pages", pods=["u-1"], drivers=given)
    node.prepared(mine, claim("c-more", name="more", pods=["u-1"], drivers={OTHER: {"Devices": None}}))
    code, out = explain(node, "pod", "u-1")
    assert code == 3
    assert f"waits for  {OTHER}: no device yet\n" in out

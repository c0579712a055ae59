"""The agent as a process with an API server and a platform connector: reports, restart, and their absence."""

import json
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from agents import UNHEALTHY, Agent, PlainSysfs, short_tmp, wait_for_health
from cluster_api import NAMESPACE, NODE, ClusterApi
from patience import PATIENCE_S
from test_nvsentinel import PlatformConnector
from wire.serving import eventually

POOL = "hugepages-2mi-node0"
__all__ = ["short_tmp"]


@pytest.fixture
def api() -> Iterator[ClusterApi]:
    with ClusterApi() as server:
        yield server


@pytest.fixture
def sysfs(short_tmp: Path) -> PlainSysfs:
    return PlainSysfs(short_tmp / "sys")


def agent_with(directory: Path, sysfs: PlainSysfs, url: str, config: str = "") -> Agent:
    """Start an agent that writes to the API server with this URL."""
    (directory / "cgroup").mkdir(exist_ok=True)
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "contexts": [{"name": "c", "context": {"cluster": "c"}}],
            }
        )
    )
    flags = ["--sysfs-root", str(sysfs.root), "--cgroupfs-root", str(directory / "cgroup")]
    flags += ["--node-name", NODE, "--period", "20ms"]
    settings = f'[k8s]\nenabled = true\nkubeconfig = "{kubeconfig}"\nnamespace = "{NAMESPACE}"\n'
    return Agent(directory, *flags, config=f'{settings}condition-kinds = ["hugepages"]\n{config}')


def status_of_condition(api: ClusterApi, type_: str = "DRAHugepageDevicesHealthy") -> object:
    return api.conditions().get(type_, {}).get("status")


def test_fault_reaches_the_node_its_events_and_nvsentinel(
    api: ClusterApi, short_tmp: Path, sysfs: PlainSysfs
) -> None:
    with PlatformConnector(short_tmp / "connector.sock") as connector:
        config = f'[nvsentinel]\nsocket = "{connector.socket}"\n'
        with agent_with(short_tmp, sysfs, api.url, config) as agent:
            eventually(lambda: status_of_condition(api) == "True", "first condition")
            sysfs.resize(7)
            eventually(lambda: status_of_condition(api) == "False", "condition of the fault")
            eventually(lambda: bool(api.objects_of("events")), "event of the fault")
            (event,) = api.objects_of("events")
            assert event["message"].startswith(f"[mem.hugepages.pool_shrunk] {POOL} is Unhealthy: ")
            wanted = {"type": "DRADevicesHealthy", "status": "False", "reason": "DevicesUnhealthy"}
            eventually(lambda: wanted in agent.status()["cluster"]["conditions"], "condition in the status")
            status = agent.status()["cluster"]
            assert (status["isHeld"], status["error"]) == (True, "")
            eventually(lambda: bool(connector.calls), "events of the devices")
            holder = api.objects_of("leases")[0]["spec"]["holderIdentity"]
            assert agent.end() == 0
        assert status_of_condition(api) == "False"
        with agent_with(short_tmp, sysfs, api.url, config) as agent:
            eventually(lambda: agent.status()["cluster"]["isHeld"], "the restarted agent holds its lease")
            assert api.objects_of("leases")[0]["spec"]["holderIdentity"] == holder
            assert agent.end() == 0


@contextmanager
def endless_api_server() -> Iterator[tuple[str, threading.Event]]:
    """Run an API server whose answers have no end. Yield its URL, and an event that the first request sets.

    A byte of each answer comes in time for the reader, so that no call ends at the agent's own timeout.
    """
    ended, is_called = threading.Event(), threading.Event()

    def answer_all() -> None:
        connections: list[socket.socket] = []
        while not ended.is_set():
            if select.select([server], [], [], 0.1)[0]:
                connections.append(server.accept()[0])
                with suppress(OSError):  # the agent has ended
                    connections[-1].send(b"HTTP/1.1 200 OK\r\nEndless: ")
                is_called.set()
            for connection in connections:
                with suppress(OSError):
                    connection.send(b"x")
        for connection in connections:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer_all)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", is_called
        finally:
            ended.set()
            thread.join()


def test_hung_api_server_delays_neither_verdict_nor_end(short_tmp: Path, sysfs: PlainSysfs) -> None:
    with endless_api_server() as (url, is_called), agent_with(short_tmp, sysfs, url) as agent:
        assert is_called.wait(PATIENCE_S)
        with agent.kubelet() as kubelet:
            sysfs.resize(7)
            assert wait_for_health(kubelet, POOL, UNHEALTHY)
            assert agent.end(signal.SIGTERM) == 0
        assert "the cluster thread did not stop" in agent.log


def test_reload_turns_a_condition_off_and_refuses_another_server(
    api: ClusterApi, short_tmp: Path, sysfs: PlainSysfs
) -> None:
    with agent_with(short_tmp, sysfs, api.url) as agent:
        eventually(lambda: status_of_condition(api) == "True", "first condition")
        file = agent.directory / "config.toml"
        file.write_text(file.read_text().replace('["hugepages"]', "[]"))
        agent.process.send_signal(signal.SIGHUP)
        agent.wait_for_log("k8s.condition-kinds")
        eventually(lambda: status_of_condition(api) is None, "condition is removed")
        file.write_text(file.read_text().replace("enabled = true", "enabled = false"))
        agent.process.send_signal(signal.SIGHUP)
        agent.wait_for_log("only a restart of the agent applies this change")
        assert agent.end() == 0

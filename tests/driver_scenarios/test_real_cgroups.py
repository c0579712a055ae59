"""A container in a real cgroup that uses what its claim gave it, as the CDI file says it.

The driver's parts run within the test, so that it can ask the monitor for what is never on the wire: notes on
pods. It judges no driver's cgroups: those are the kubelet's and the runtime's.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from hostdev_driver.claims import ClaimFiles
from hostdev_driver.driver import HostDriver
from hostdev_driver.grant_store import GrantStore
from hostdev_driver.host import Host
from machine import hugepages, kubepods_tree
from patience import PATIENCE_S
from private_mounts import within_mounts
from wire.serving import eventually

import drahealth
from driver_scenarios.node import HOSTDEV, NODE, PAGES, Ask, Node, parameters

POD: Final = "0f3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0"
CONTAINER: Final = "c" * 64
POOL_PAGES: Final = 4
CLAIMED: Final = 2

# Joins a cgroup, mounts a hugetlbfs in a mount namespace of its own, and touches pages of a file there until
# its input ends. Prints their number.
CONTAINER_RUNS: Final = """
import mmap, resource, sys
procs, size, pages, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with open(procs, "w") as f:
    f.write("0")
with open(file, "w+b") as f:
    f.truncate(size * pages)
    area = mmap.mmap(f.fileno(), size * pages)
for page in range(pages):
    area[page * size] = 1
    print(page + 1, flush=True)
sys.stdin.read()
"""


class Stage(NamedTuple):
    """A driver of the real host and a kubelet; and the cgroup of a container."""

    node: Node
    driver: HostDriver
    group: Path

    @property
    def monitor(self) -> drahealth.Monitor:
        """The driver's."""
        return self.driver.monitor


@pytest.fixture
def stage(node: Node) -> Iterator[Stage]:
    if Path("/sys/devices/system/node/node1").exists():
        pytest.skip("more than one NUMA node: on which of them pages go is the kernel's choice")
    with ExitStack() as stack:
        stack.enter_context(hugepages(2048, POOL_PAGES))
        pods = stack.enter_context(kubepods_tree(hugetlb=True))
        state = node.root / "state"
        config = drahealth.Config(node_name=NODE, kubelet_cgroup_root=pods.cgroup_root)
        monitor = drahealth.Monitor(HOSTDEV, config=config, state_dir=state)
        driver = HostDriver(monitor, Host(NODE), GrantStore(state / "ledger.json"), node.cdi)
        stack.enter_context(monitor)
        claims = ClaimFiles(node.claims, HOSTDEV)
        server = drahealth.PluginServer(monitor, driver, get_claim=claims, kubelet_dir=node.kubelet.root)
        stack.callback(server.stop)
        server.start(PATIENCE_S)
        node.wait_healthy(PAGES)
        yield Stage(node, driver, pods.make("burstable", POD, CONTAINER))


def container(stage: Stage, pages: int) -> subprocess.Popen[str]:
    """Run a process in the cgroup, with the mount of the only CDI file."""
    (file,) = stage.node.cdi.iterdir()
    (device,) = json.loads(file.read_bytes())["devices"]
    (mount,) = device["containerEdits"]["mounts"]
    at = stage.node.root / "hugepages"
    at.mkdir()
    script = 'mount -t "$1" -o "$2" "$3" "$4" && shift 4 && exec "$@"'
    words = (mount["type"], ",".join(mount["options"]), mount["hostPath"], str(at))
    mounted = within_mounts('mount -t tmpfs none "$1"', at)
    runs = (sys.executable, "-c", CONTAINER_RUNS, str(stage.group / "cgroup.procs"), str(2 << 20), str(pages))
    command = [*mounted, "sh", "-c", script, "sh", *words, *runs, str(at / "pages")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def notes(stage: Stage) -> list[tuple[str, str, str]]:
    """Subject, code and evidence of each."""
    report = stage.monitor.report
    assert report is not None
    return [(note.subject, note.cause.code, note.cause.evidence) for note in report.notes]


def test_container_using_all_claimed_pages_has_no_finding(stage: Stage) -> None:
    (stage.group / "hugetlb.2MB.max").write_text(f"{CLAIMED * 2}M")
    pod = stage.node.run_and_wait(
        "it", Ask("it", {"r": PAGES}, [parameters("HugepagesParameters", pages=CLAIMED)])
    )
    with container(stage, CLAIMED) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(CLAIMED)] == ["1\n", "2\n"]
        assert stage.driver.host.free_pages("2Mi", 0) == POOL_PAGES - CLAIMED
        assert stage.driver.pages_left(stage.driver.host.found[PAGES].device) is None
        assert [note for note in notes(stage) if note[0] != "node"] == []  # the test may run on busy CPUs
        process.communicate()
    stage.node.end(pod)


def test_container_limit_below_its_claim_is_a_note_only(
    stage: Stage,
) -> None:
    """The kubelet's cgroup of a pod that claims two pages and requests one in its resources."""
    (stage.group / "hugetlb.2MB.max").write_text("2M")
    pod = stage.node.run_and_wait(
        "it", Ask("it", {"r": PAGES}, [parameters("HugepagesParameters", pages=CLAIMED)])
    )
    with container(stage, CLAIMED) as process:
        output, _ = process.communicate()
    assert (process.returncode, output) == (-signal.SIGBUS, "1\n")
    subject = f"pod {POD} container {CONTAINER}"
    expected = (subject, "cgroup.hugetlb.max_hit", "2mi pages hit the limit (limit 2 MiB)")
    eventually(lambda: expected in notes(stage), f"a note: {expected}, among {notes(stage)}")
    stage.node.wait_healthy(PAGES)
    stage.node.wait_resources(pod, [("Healthy", "")])
    stage.node.end(pod)


def test_use_of_unclaimed_pages_is_reported_for_the_device(stage: Stage) -> None:
    """A process of the host's takes one: the device works, and says that the next claim may find too few."""
    (stage.group / "hugetlb.2MB.max").write_text("max")
    pod = stage.node.run_and_wait(
        "it", Ask("it", {"r": PAGES}, [parameters("HugepagesParameters", pages=CLAIMED)])
    )
    with container(stage, CLAIMED) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stage.node.end(pod)  # the process continues with pages that no claim holds now
        text = "hostdev.pages_taken: pages of 2Mi that no claim holds are in use"

        def is_reported() -> bool:
            stage.monitor.recheck("pages-left")
            return stage.node.kubelet.health(HOSTDEV, NODE, PAGES).message.startswith(text)

        stage.node.kubelet.wait_for(is_reported, text)
        assert stage.node.kubelet.health(HOSTDEV, NODE, PAGES).health == "Healthy"
        process.communicate()

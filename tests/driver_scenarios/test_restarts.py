"""Restarts of driver and kubelet: no state is lost and nothing is left over."""

import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import grpc
import pytest
from kubelet import Pace, Pod
from kubelet.history import Called, Changed, Cleared, Deregistered, SlicesWiped, StreamEnded, StreamOpened
from test_embed_processes import LATE

from driver_scenarios.node import CPU_0, CPU_1, FAKE, HOSTDEV, NODE, PAGES, REAL, SICK, Ask, Node, parameters
from driver_scenarios.program import Program

BROKEN = ["broken", "thing-0", "bank 3 is dark"]


@contextmanager
def blocked_claim_file(node: Node, claim: Ask) -> Iterator[Callable[[], None]]:
    """Block readers of the claim's file until the context ends. Yields a function that waits for a reader."""
    file, opened = node.claim_file(claim.name), list[int]()
    text = file.read_bytes()
    file.unlink()
    os.mkfifo(file)

    def is_read() -> bool:
        with suppress(OSError):  # ENXIO: there is no reader
            opened.append(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    def wait_until_read() -> None:
        node.kubelet.wait_for(is_read, "a reader of the claim")

    yield wait_until_read
    later = file.with_suffix(".later")
    later.write_bytes(text)
    later.rename(file)
    for fd in opened:
        os.write(fd, text)
        os.close(fd)


def event_count(node: Node, pod: Pod) -> int:
    """Return the count of the pod's only failure event."""
    (event,) = node.failures(pod)
    return event.count


# --- the driver -----------------------------------------------------------------------------------------


def test_ended_driver_unregisters_and_the_next_one_continues(node: Node, hostdev: Program) -> None:
    """e2e_node: registration after plugin restart; Unknown after plugin stop and recovery; reconnect of both
    APIs; ResourceSlice removal after stop"""
    claim = Ask("it", {"pages": PAGES, "cpu": CPU_1})
    pod = node.run_and_wait("it", claim)
    wrong = node.run("wrong", Ask("wrong", {"r": CPU_0}, [parameters("CpuParameters", cpus="9")]))
    text = (
        f"[class=bad-config code=cpu.opaque_cpuset.invalid device={HOSTDEV}/{NODE}/{CPU_0} request=r"
        f" retry=never] CPUs 9 are not of {CPU_0}, which has 0; the claim must change."
    )
    node.wait_event(wrong, "wrong", text)
    kept = {path.name: path.read_bytes() for path in node.cdi.iterdir()}

    assert hostdev.end() == 0
    ended = node.kubelet.wait_for(lambda: node.kubelet.history.of(StreamEnded), "the stream's end")
    # A kubelet that sees the registration socket vanish first cancels the stream itself.
    if ended[0].code is not grpc.StatusCode.CANCELLED:
        assert (ended[0].code, ended[0].details) == (grpc.StatusCode.UNAVAILABLE, "driver shutting down")
    plugins = node.kubelet.root / "plugins" / HOSTDEV
    assert [path for path in plugins.iterdir() if path.is_socket()] == []
    assert list((node.kubelet.root / "plugins_registry").iterdir()) == []
    node.wait_resources(pod, [("Unknown", ""), ("Unknown", "")])
    node.kubelet.wait_for(lambda: SlicesWiped(HOSTDEV) in node.kubelet.history.of(SlicesWiped), "the wipe")
    assert {path.name: path.read_bytes() for path in node.cdi.iterdir()} == kept, "pods still use it"

    again = node.hostdev()
    node.wait_resources(pod, [("Healthy", ""), ("Healthy", "")])
    node.wait_event(wrong, "wrong", text, times=event_count(node, wrong) + 1)
    assert "prepare failed: " not in again.log, "answered from memory"
    node.end(pod, wrong)
    assert node.cdi_files() == set()


@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
def test_shrunk_pool_of_a_claim_stays_unhealthy_after_a_restart(
    node: Node, hostdev: Program, boot_id: str
) -> None:
    pod = node.run_and_wait("it", Ask("it", {"pages": PAGES}))
    node.sysfs.resize(5)
    node.kubelet.wait_health(HOSTDEV, NODE, PAGES, "Unhealthy")
    hostdev.end(signal.SIGKILL)
    node.reboot(boot_id)
    node.kubelet.wait_for(lambda: node.kubelet.history.of(Cleared), "the end of the stream")
    since = len(node.kubelet.history)
    again = node.hostdev()

    def changes() -> list[str]:
        return [
            change.health
            for change in node.kubelet.history.of(Changed, since=since)
            if change.device == PAGES
        ]

    assert set(node.kubelet.wait_for(changes, "the health from the next instance")) == {"Unhealthy"}
    assert "mem.hugepages.pool_shrunk: " in node.kubelet.health(HOSTDEV, NODE, PAGES).message
    node.sysfs.resize(8)
    node.wait_resources(pod, [("Healthy", "")])
    assert "WARNING" not in LATE.sub("", again.log)


def test_driver_reported_fault_and_taint_time_survive_a_restart(node: Node, failing_driver: Program) -> None:
    node.fate(it=BROKEN)
    pod = node.run("it", Ask("it", {"r": "thing-0"}), driver=SICK)
    text = (
        f"[class=failed-device code=thing.broken device={SICK}/{NODE}/thing-0 request=r retry=after-repair]"
        " bank 3 is dark; the device is Unhealthy, its taint is offered."
    )
    node.wait_event(pod, "it", text, times=1)
    before = node.kubelet.wait_health(SICK, NODE, "thing-0", "Unhealthy")
    tainted = node.kubelet.wait_for(
        lambda: [record for record in failing_driver.records("taints") if record["tainted"]], "taints"
    )
    assert failing_driver.end() == 0
    node.kubelet.wait_for(lambda: node.kubelet.history.of(Cleared), "the end")

    seen = len(node.kubelet.history)
    again = node.start_failing_driver()
    after = node.kubelet.wait_health(SICK, NODE, "thing-0", "Unhealthy")
    assert after.message == before.message
    changes = {
        change.health for change in node.kubelet.history.of(Changed, since=seen) if change.device == "thing-0"
    }
    assert changes == {"Unhealthy"}, "no other health in between"
    published = node.kubelet.wait_for(lambda: again.records("taints"), "taints")
    assert published[0]["tainted"] == tainted[-1]["tainted"], "timeAdded and all"
    asked = len(again.records("prepare"))  # before the first evaluation of the device
    node.wait_event(pod, "it", text, times=event_count(node, pod) + 3)
    assert len(again.records("prepare")) <= asked + 1, "refused from memory, but for one that was on its way"


def test_prepare_after_a_kill_gives_the_same_result(node: Node, hostdev: Program) -> None:
    """e2e_node: in progress at restart

    The driver is killed between its two files: the lock of the second one is held.
    """
    claim = Ask("it", {"pages": PAGES, "cpu": CPU_1}, [parameters("HugepagesParameters", "pages", pages=3)])
    ledger = node.kubelet.root / "plugins" / HOSTDEV / "ledger.json"
    node.cdi.mkdir()
    with open(node.cdi / f".{HOSTDEV}-device_{claim.uid}.json.new", "wb") as unfinished:
        fcntl.flock(unfinished, fcntl.LOCK_EX)
        pod = node.run("it", claim)
        node.kubelet.wait_for(ledger.exists, "the ledger")
        assert hostdev.end(signal.SIGKILL) == -signal.SIGKILL
    call = node.kubelet.wait_for(node.calls, "the call's end")[0]  # the kubelet soon tries again
    assert call.error.startswith("rpc error: code = Unavailable")
    held = ledger.read_bytes()
    assert held.count(b"uid-it") == 1
    node.hostdev()
    node.kubelet.wait_running(pod)
    assert ledger.read_bytes() == held
    assert node.cdi_files() == {claim.uid}
    node.end(pod)
    assert node.cdi_files() == set()


@pytest.mark.parametrize("kubelet", [FAKE, *REAL])
def test_slices_survive_a_quick_restart(make_node: Callable[..., Node], kubelet: tuple[str, bool]) -> None:
    """e2e_node: ResourceSlice survival of a quick restart; ResourceSlice removal at startup"""
    version, real = kubelet
    node = make_node(version=version, real=real, pace=replace(Pace.fast(), wipe_s=30.0))
    driver = node.hostdev()
    node.wait_healthy(CPU_0)
    driver.end()
    node.hostdev()
    node.wait_healthy(CPU_0)
    assert node.kubelet.history.of(SlicesWiped) == [SlicesWiped("")]


# --- the kubelet ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hostdev")
@pytest.mark.parametrize("graceful", [True, False])
def test_restarted_kubelet_shows_the_same_state(node: Node, graceful: bool) -> None:
    """e2e_node: registration after kubelet restart; retry after kubelet restart

    After a crash it has an old picture, in which an equal list would change nothing: so it gets none.
    """
    pod = node.run_and_wait("it", Ask("it", {"cpu": CPU_1}))
    node.kubelet.stop(graceful=graceful)
    node.kubelet.pass_time(33)  # every lease is over
    seen = len(node.kubelet.history)
    node.kubelet.start()
    node.kubelet.wait_registered(HOSTDEV)
    node.kubelet.wait_for(
        lambda: (
            {change.device for change in node.kubelet.history.of(Changed, since=seen)}
            == {PAGES, CPU_0, CPU_1}
        ),
        "a change of every device",
    )
    node.wait_resources(pod, [("Healthy", "")])
    node.end(pod)
    assert node.cdi_files() == set()


def test_kubelet_and_driver_that_died_together_show_the_same_state(node: Node, hostdev: Program) -> None:
    """The kubelet loads the last list, which has expired: an equal one would change nothing."""
    pod, driver = node.run_and_wait("it", Ask("it", {"cpu": CPU_1})), hostdev
    for _ in range(3):
        node.kubelet.stop(graceful=False)
        driver.end(signal.SIGKILL)
        node.kubelet.clock.advance(60)  # every lease is over
        seen = len(node.kubelet.history)
        node.kubelet.start()
        driver = node.hostdev()
        node.kubelet.wait_for(
            lambda since=seen: (
                {change.device for change in node.kubelet.history.of(Changed, since=since)}
                == {PAGES, CPU_0, CPU_1}
            ),
            "a change of every device",
        )
        node.wait_resources(pod, [("Healthy", "")])


@pytest.mark.usefixtures("hostdev")
def test_prepare_survives_a_kubelet_restart(node: Node) -> None:
    """e2e_node: retry after kubelet restart; in progress at restart"""
    claim = Ask("it", {"cpu": CPU_1})
    pod = node.pod("it", claim)
    with blocked_claim_file(node, claim) as wait_until_read:
        node.kubelet.run_pod(pod)
        wait_until_read()
        node.kubelet.stop(graceful=False)
    node.kubelet.wait_for(lambda: node.cdi_files() == {claim.uid}, "the claim is prepared")
    node.kubelet.start()
    node.kubelet.wait_running(pod)
    assert node.failures(pod) == []
    assert node.cdi_files() == {claim.uid}


@pytest.mark.usefixtures("hostdev")
def test_pods_changed_without_a_kubelet_are_reconciled(node: Node) -> None:
    """e2e_node: pod created while kubelet is down; unprepare for deleted pods; no prepare for deleted pod"""
    going = node.run_and_wait("going", Ask("going", {"cpu": CPU_0}))
    node.kubelet.stop()
    node.kubelet.delete_pod(going)
    coming = node.run("coming", Ask("coming", {"cpu": CPU_1}))
    both = node.run("both", Ask("both", {"pages": PAGES}))
    node.kubelet.delete_pod(both)
    node.kubelet.start()
    node.kubelet.wait_running(coming)
    node.kubelet.wait_for(lambda: node.cdi_files() == {"uid-coming"}, "one CDI file")
    assert ["uid-both"] not in [list(call.claims) for call in node.calls()]


def test_driver_waits_for_the_kubelet(node: Node) -> None:
    """e2e_node: registration"""
    node.kubelet.stop()
    driver = node.hostdev()
    driver.logs("offers")
    socket = node.kubelet.root / "plugins_registry" / f"{HOSTDEV}-reg.sock"
    node.kubelet.wait_for(socket.exists, "the socket")
    node.kubelet.start()
    node.wait_healthy(CPU_0)
    node.end(node.run_and_wait("it", Ask("it", {"cpu": CPU_0})))


# --- sockets and directories ----------------------------------------------------------------------------


@pytest.mark.usefixtures("hostdev")
def test_recreated_registry_gets_its_socket_again(node: Node) -> None:
    """e2e_node: registration after kubelet restart"""
    node.kubelet.stop()
    shutil.rmtree(node.kubelet.root / "plugins_registry")
    node.kubelet.start()
    node.kubelet.wait_registered(HOSTDEV)
    node.wait_healthy(CPU_0)


@pytest.mark.usefixtures("hostdev")
def test_removed_registration_socket_is_created_again(node: Node) -> None:
    (node.kubelet.root / "plugins_registry" / f"{HOSTDEV}-reg.sock").unlink()
    node.kubelet.wait_for(lambda: node.kubelet.history.of(Deregistered), "it let go of the driver")
    node.kubelet.wait_registered(HOSTDEV)
    node.wait_healthy(CPU_0)
    assert len(node.kubelet.history.of(StreamOpened)) == 2


@pytest.mark.usefixtures("hostdev")
def test_removed_service_socket_is_created_for_the_next_kubelet(node: Node) -> None:
    """e2e_node: functional after reconnect, 2 sockets"""
    socket = node.kubelet.root / "plugins" / HOSTDEV / "dra.sock"
    socket.unlink()
    pod = node.run_and_wait("it", Ask("it", {"cpu": CPU_0}))  # over the connection that is there
    node.kubelet.wait_for(socket.exists, "a new socket")
    node.kubelet.restart()
    node.wait_healthy(CPU_0)
    node.end(pod)


@pytest.mark.parametrize("kubelet", [FAKE, *REAL])
def test_stopped_driver_is_registered_when_it_continues(
    make_node: Callable[..., Node], kubelet: tuple[str, bool]
) -> None:
    """e2e_node: registration after GetInfo failure"""
    version, real = kubelet
    node = make_node(version=version, real=real, pace=replace(Pace.fast(), dial_s=1.0))
    driver = node.hostdev()
    node.wait_healthy(CPU_0)
    node.kubelet.stop()
    driver.pause()
    node.kubelet.start()
    node.kubelet.wait_for(lambda: "dial failed" in str(list(node.kubelet.history)), "a failed registration")
    driver.resume()
    node.wait_healthy(CPU_0)


# --- unknown claims ---------------------------------------------------------------------------------------


def test_unknown_claim_is_unprepared(node: Node, hostdev: Program) -> None:
    """The driver's whole memory is gone: the pod ends all the same."""
    pod = node.run_and_wait("it", Ask("it", {"pages": PAGES, "cpu": CPU_1}))
    hostdev.end()
    shutil.rmtree(node.kubelet.root / "plugins" / HOSTDEV)
    shutil.rmtree(node.cdi)
    node.claim_file("it").unlink()
    node.hostdev()
    node.kubelet.wait_registered(HOSTDEV)
    node.end(pod)


@pytest.mark.usefixtures("hostdev")
def test_pod_deleted_during_its_prepare_leaves_nothing(node: Node) -> None:
    """e2e_node: unprepare for deleted pods"""
    claim = Ask("it", {"cpu": CPU_1})
    pod = node.pod("it", claim)
    with blocked_claim_file(node, claim) as wait_until_read:
        node.kubelet.run_pod(pod)
        wait_until_read()
        node.kubelet.delete_pod(pod)
    node.kubelet.wait_gone(pod)
    assert [(call.method, call.error) for call in node.kubelet.history.of(Called)] == [
        ("NodePrepareResources", ""),
        ("NodeUnprepareResources", ""),
    ]
    assert node.cdi_files() == set()
    assert b"uid-it" not in (node.kubelet.root / "plugins" / HOSTDEV / "ledger.json").read_bytes()

"""Driver with a real agent: its calls over the socket, and their effects."""

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from agents import (
    DRIVER,
    HEALTHY,
    UNHEALTHY,
    UNKNOWN,
    Agent,
    PlainSysfs,
    run_command,
    short_tmp,  # noqa: F401  # a fixture
    wait_for_health,
    wait_for_message,
)
from held_lock import held_lock
from kubelet_files import checkpoint
from kubelet_files import claim as saved_claim
from patience import PATIENCE_S
from wire.google import Watcher, message_class, names
from wire.serving import eventually

from agent.sources.kubelet_files import CLAIMS_FILE

CONFIG = '[stream]\nheartbeat = "1s"\n[taints]\nquiet = "0s"\n'
EVALUATION_S = 2.0  # the agent's answer to a declaration waits so long for the first verdicts


def message(kind: str, /, **fields: Any) -> Any:
    """Return a message of the driver link."""
    return message_class("drahealth.v1.DriverLink", kind)(**fields)


def pages(name: str, count: int, **fields: Any) -> Any:
    """Return a declared device of hugepages."""
    return message(
        "DeclaredDevice", name=name, hugepages=message("HugepagesPart", size="2Mi", pages=count), **fields
    )


def claim(name: str, *devices: str, fingerprint: str = "") -> Any:
    """Return a claim of these devices."""
    given = [message("ClaimedDevice", request="r", pool="node-1", device=device) for device in devices]
    return message(
        "PrepareClaim", namespace="ns", name=name, uid=f"uid-{name}", devices=given, fingerprint=fingerprint
    )


def errno(number: int, operation: int = 0, text: str = "") -> Any:
    return message("Evidence", errno=message("Errno", number=number, operation=operation, text=text))


def driver_error(error_class: int, summary: str, **fields: Any) -> Any:
    return message(
        "Evidence",
        driver_error=message("DriverReportedError", error_class=error_class, summary=summary, **fields),
    )


BAD_CONFIG, FAILED_DEVICE = 2, 3
CDI = 2


class Driver:
    """Driver at the other end of the socket, with Google's gRPC and protobuf."""

    def __init__(self, agent: Agent, name: str = DRIVER) -> None:
        self.agent = agent
        self.socket = agent.health_socket.with_name(f"{name}.sock")

    def __call__(self, method: str, request: Any, reply: str) -> Any:
        """Make a call on its own connection."""
        with grpc.insecure_channel(f"unix:{self.socket}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary(
                f"/drahealth.v1.DriverLink/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=message_class("drahealth.v1.DriverLink", reply).FromString,
            )
            return call(request, timeout=PATIENCE_S)

    def declare(self, *devices: Any) -> Any:
        """Declare devices, again until they are evaluated in the time that the agent has for its answer."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            began_s = time.monotonic()
            reply = self("SyncDevices", message("SyncDevicesRequest", devices=devices), "SyncDevicesReply")
            if reply.evaluated:
                return reply
            assert began_s + EVALUATION_S <= time.monotonic() < end_s, "the agent waits for the verdicts"

    @property
    def ledger(self) -> Path:
        """File with the results of prepares; on a slow disk, an answer may come before the file."""
        return self.agent.directory / "run" / "state" / "drivers" / DRIVER / "prepares.json"

    def wait_saved(self, text: str) -> None:
        """Wait until the ledger's file contains a text."""
        eventually(lambda: self.ledger.exists() and text in self.ledger.read_text(), f"{text} is saved")

    def check(self, *claims: Any) -> Sequence[Any]:
        return self("CheckClaims", message("CheckClaimsRequest", claims=claims), "CheckClaimsReply").answers

    def classify(self, *evidence: Any, of_claim: Any = None) -> Any:
        return self(
            "Classify", message("ClassifyRequest", claim=of_claim, evidence=evidence), "ClassifyReply"
        ).verdict

    def report(self, *outcomes: Any, step: int = 1) -> Sequence[Any]:
        request = message("ReportPrepareRequest", step=step, outcomes=outcomes)
        return self("ReportPrepare", request, "ReportPrepareReply").answers

    def report_failure(self, of_claim: Any, *evidence: Any, step: int = 1) -> Any:
        """Report the failure of one claim and return its answer."""
        [answer] = self.report(
            message("PrepareOutcome", claim=of_claim, failed=True, evidence=evidence), step=step
        )
        return answer

    def report_success(self, of_claim: Any, step: int = 1) -> Any:
        [answer] = self.report(message("PrepareOutcome", claim=of_claim), step=step)
        return answer

    def taints(self) -> Watcher:
        return Watcher(
            self.agent.health_socket,
            "/drahealth.v1.DriverLink/WatchTaints",
            message_class("drahealth.v1.DriverLink", "WatchTaintsRequest"),
            message_class("drahealth.v1.DriverLink", "DeviceTaints"),
        )


@pytest.fixture
def sysfs(short_tmp: Path) -> PlainSysfs:  # noqa: F811
    return PlainSysfs(short_tmp / "sys")


def start(directory: Path, *flags: str) -> Agent:
    return Agent(
        directory,
        *("--sysfs-root", str(directory / "sys"), "--node-name", "node-1", "--period", "50ms"),
        *("--cgroupfs-root", str(directory / "none"), "--kmsg", str(directory / "none")),
        *("--nvml-library", str(directory / "none"), *flags),
        config=CONFIG,
    )


@pytest.fixture
def agent(short_tmp: Path, sysfs: PlainSysfs) -> Iterator[Agent]:  # noqa: F811
    with start(short_tmp) as agent:
        yield agent


@pytest.fixture
def driver(agent: Agent) -> Driver:
    return Driver(agent)


def test_declared_devices_replace_host_devices_for_the_kubelet(agent: Agent, driver: Driver) -> None:
    with agent.kubelet() as kubelet:
        assert "cpu-node0" in names(kubelet.next())
        reply = driver.declare(pages("huge-0", 4), pages("huge-1", 4, pool="rack-1"))
        assert (reply.devices, reply.evaluated) == (2, True)
    with agent.kubelet() as kubelet:
        first = kubelet.next()
        assert [
            (first.device.pool_name, first.device.device_name, first.health) for first in first.devices
        ] == [
            ("node-1", "huge-0", HEALTHY),
            ("rack-1", "huge-1", HEALTHY),
        ]


def test_declared_device_is_evaluated_by_its_parts(agent: Agent, driver: Driver, sysfs: PlainSysfs) -> None:
    driver.declare(pages("huge-0", 8))
    with agent.kubelet() as kubelet:
        wait_for_health(kubelet, "huge-0", HEALTHY)
        sysfs.resize(6)
        verdict = wait_for_health(kubelet, "huge-0", UNHEALTHY)
    assert verdict.message.startswith("mem.hugepages.pool_shrunk: 6 pages of 2mi on NUMA node 0, 8 declared")


def test_declarations_outlive_the_agent_process(agent: Agent, driver: Driver, short_tmp: Path) -> None:  # noqa: F811
    driver.declare(pages("huge-0", 4))
    agent.end(signal.SIGKILL)
    with start(short_tmp) as restarted, restarted.kubelet() as kubelet:
        assert names(kubelet.next()) == ["huge-0"]


def check_result(finding: Any = None, **fields: Any) -> Any:
    outcome = {"no_fault": message("NoFault")} if finding is None else {"finding": finding}
    given = {"check": "link", "device": "card-0", "every_s": 1, "raise_after": 1, "clear_after": 1}
    return message("CheckResult", **given, **outcome, **fields)


def report_checks(driver: Driver, *results: Any) -> None:
    driver("ReportChecks", message("ReportChecksRequest", results=results), "ReportChecksReply")


def test_results_of_driver_checks_reach_the_kubelet_and_expire(agent: Agent, driver: Driver) -> None:
    report_checks(driver, check_result(lease_s=60))
    reply = driver.declare(message("DeclaredDevice", name="card-0", checks=["link"]))
    assert (reply.devices, reply.evaluated) == (1, True)
    with agent.kubelet() as kubelet:
        wait_for_health(kubelet, "card-0", HEALTHY)
        down = message("CheckFinding", code="card.link", severity=3, evidence="link is down")
        report_checks(driver, check_result(down, lease_s=60))
        assert wait_for_health(kubelet, "card-0", UNHEALTHY).message.startswith("card.link: link is down")
        report_checks(driver, check_result(lease_s=60))
        wait_for_health(kubelet, "card-0", HEALTHY)
        report_checks(driver, check_result(lease_s=3))
        verdict = wait_for_health(kubelet, "card-0", UNKNOWN)
    assert verdict.message.startswith("check.link.expired: no result of the driver for more than 3 s")


def test_restarted_agent_waits_for_results_of_driver_checks(
    agent: Agent,
    driver: Driver,
    short_tmp: Path,  # noqa: F811
) -> None:
    report_checks(driver, check_result(lease_s=60))
    driver.declare(pages("card-0", 4, checks=["link"]))
    agent.end(signal.SIGKILL)
    with start(short_tmp) as restarted, restarted.kubelet() as kubelet:
        first = next(device for device in kubelet.next().devices if device.device.device_name == "card-0")
        assert (first.health, first.message.partition(":")[0]) == (UNKNOWN, "check.link.expired")
        report_checks(Driver(restarted), check_result(lease_s=60, age_s=1))
        wait_for_health(kubelet, "card-0", HEALTHY)


def test_sync_does_not_wait_for_removed_devices(agent: Agent, driver: Driver) -> None:
    """A removed device is reported as Unknown for a while; the answer is about the remaining devices."""
    driver.declare(pages("huge-0", 4), pages("huge-1", 4))
    for rest in ([pages("huge-1", 4)], []):
        reply = driver.declare(*rest)
        assert (reply.devices, reply.evaluated) == (len(rest), True)
        with agent.kubelet() as kubelet:
            assert {first.device.device_name: first.health for first in kubelet.next().devices} == {
                "huge-0": UNKNOWN,
                "huge-1": HEALTHY if rest else UNKNOWN,
            }


def test_driver_without_devices_has_none_after_a_restart(
    agent: Agent,
    driver: Driver,
    short_tmp: Path,  # noqa: F811
) -> None:
    assert driver.declare().evaluated
    with agent.kubelet() as kubelet:
        driver.declare(pages("huge-0", 4))
        assert names(kubelet.next()) == ["huge-0"]  # the first list: an empty list is not sent
    driver.declare()
    agent.end(signal.SIGKILL)
    with start(short_tmp) as restarted, restarted.kubelet() as kubelet:
        Driver(restarted).declare(pages("huge-1", 4))
        assert names(kubelet.next()) == ["huge-1"]


def test_invalid_declaration_is_refused_and_changes_nothing(agent: Agent, driver: Driver) -> None:
    driver.declare(pages("huge-0", 4))
    with pytest.raises(grpc.RpcError) as caught:
        driver.declare(pages("huge-0", 4), pages("Huge-1", 4))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'Huge-1' is not a DNS label" in caught.value.details()
    with agent.kubelet() as kubelet:
        assert names(kubelet.next()) == ["huge-0"]


def test_declaration_file_of_the_operator_is_not_replaced(agent: Agent, driver: Driver) -> None:
    file = agent.directory / "run" / "devices.d" / f"{DRIVER}.toml"
    eventually(file.parent.is_dir, "the directory")
    file.write_text("version = 1\n")
    with pytest.raises(grpc.RpcError) as caught:
        driver.declare(pages("huge-0", 4))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details().startswith(f"declaration file {file}: not written by drahealth")


def test_classify_returns_verdict_and_has_no_effect(agent: Agent, driver: Driver) -> None:
    driver.declare(pages("huge-0", 4))
    verdict = driver.classify(errno(28, CDI, "write /var/run/cdi/x.json: no space left on device"))
    assert (verdict.error_class, verdict.code) == (1, "cdi.write")
    assert verdict.text.startswith("[class=transient code=cdi.write")
    verdict = driver.classify(
        driver_error(FAILED_DEVICE, "it is dead", device="huge-0"), of_claim=claim("a", "huge-0")
    )
    assert verdict.error_class == FAILED_DEVICE
    assert driver.check(claim("a", "huge-0"))[0].verdict.code == ""
    with agent.kubelet() as kubelet:
        assert [first.health for first in kubelet.next().devices] == [HEALTHY]


def test_failed_device_is_unhealthy_and_tainted_before_the_answer(agent: Agent, driver: Driver) -> None:
    driver.declare(pages("huge-0", 4), pages("huge-1", 4))
    with driver.taints() as taints:
        wait_for_message(
            taints, lambda first: [list(device.taints) for device in first.devices] == [[], []], "no taints"
        )
        answer = driver.report_failure(
            claim("a", "huge-0"),
            driver_error(FAILED_DEVICE, "no page can be had", device="huge-0", code="huge.dead"),
        )
        assert answer.uid == "uid-a"
        assert answer.verdict.code == "huge.dead"
        assert [first.device for first in answer.verdict.devices] == ["huge-0"]
        with agent.kubelet() as kubelet:
            [broken, healthy] = kubelet.next().devices
            if "fault not delivered to all health streams" in agent.log:  # the machine was too busy
                broken = wait_for_health(kubelet, "huge-0", UNHEALTHY)
            assert (broken.health, healthy.health) == (UNHEALTHY, HEALTHY)
            assert "huge.dead: no page can be had" in broken.message
        changed = wait_for_message(taints, lambda first: first.devices[0].taints, "a taint")
        [taint] = changed.devices[0].taints
        assert (taint.effect, taint.key.split("/")[0]) == (2, DRIVER)
        assert taint.time_added_s > 0
        assert not changed.devices[1].taints
        assert driver.report_success(claim("a", "huge-0")).verdict.code == ""
        wait_for_message(taints, lambda first: not first.devices[0].taints, "the taint is gone")


def test_driver_fault_outlives_the_agent_process(agent: Agent, driver: Driver, short_tmp: Path) -> None:  # noqa: F811
    driver.declare(pages("huge-0", 4))
    driver.report_failure(claim("a", "huge-0"), driver_error(FAILED_DEVICE, "it is dead", device="huge-0"))
    driver.wait_saved("it is dead")
    agent.end(signal.SIGKILL)
    with start(short_tmp) as restarted, restarted.kubelet() as kubelet:
        assert kubelet.next().devices[0].health == UNHEALTHY
        assert Driver(restarted).check(claim("a", "huge-0"))[0].verdict.error_class == FAILED_DEVICE


def test_cleared_driver_fault_ends_and_stays_ended(
    agent: Agent,
    driver: Driver,
    short_tmp: Path,  # noqa: F811
) -> None:
    driver.declare(pages("huge-0", 4))
    driver.report_failure(
        claim("a", "huge-0"), driver_error(FAILED_DEVICE, "dead", device="huge-0", code="huge.dead")
    )
    assert driver.check(claim("a", "huge-0"))[0].verdict.error_class == FAILED_DEVICE
    driver.wait_saved("huge.dead")
    uncleared = driver.ledger.read_text()
    with agent.kubelet() as kubelet, driver.taints() as taints:
        wait_for_health(kubelet, "huge-0", UNHEALTHY)
        name = f"{DRIVER}/node-1/huge-0"
        done = run_command("clear", name, "--runtime-dir", str(short_tmp / "run"), env=agent.environ)
        assert done.stdout == f"{name}: fault huge.dead cleared\n", done.stderr
        wait_for_health(kubelet, "huge-0", HEALTHY)
        wait_for_message(taints, lambda first: not first.devices[0].taints, "the taint is gone")
    agent.wait_for_log(f"{name}: fault huge.dead cleared by uid")
    assert driver.check(claim("a", "huge-0"))[0].verdict.code == "", "the failure is no longer cached"
    # an agent that ends waits less than two seconds for the disk
    eventually(lambda: driver.ledger.read_text() != uncleared, "the clear is saved")
    assert agent.end() == 0
    with start(short_tmp) as restarted, restarted.kubelet() as kubelet:
        assert kubelet.next().devices[0].health == HEALTHY
        again = Driver(restarted)
        again.report_failure(claim("a", "huge-0"), driver_error(FAILED_DEVICE, "dead", device="huge-0"))
        wait_for_health(kubelet, "huge-0", UNHEALTHY)


def test_bad_config_claim_is_refused_until_its_fingerprint_changes(driver: Driver) -> None:
    bad_claim = claim("a", fingerprint="1")
    verdict = driver.report_failure(bad_claim, driver_error(BAD_CONFIG, "mode 'x' is none of a, b")).verdict
    [answer] = driver.check(bad_claim)
    assert answer.verdict.text == verdict.text
    assert answer.verdict.count == 1
    assert driver.check(claim("a", fingerprint="2"))[0].verdict.code == ""


def test_check_refuses_claims_of_an_unhealthy_device(agent: Agent, driver: Driver, sysfs: PlainSysfs) -> None:
    driver.declare(pages("huge-0", 8))
    with agent.kubelet() as kubelet:
        sysfs.resize(6)
        wait_for_health(kubelet, "huge-0", UNHEALTHY)
    healthy, unhealthy = driver.check(claim("a"), claim("b", "huge-0"))
    assert healthy.verdict.code == ""
    assert (unhealthy.verdict.error_class, unhealthy.verdict.code) == (
        FAILED_DEVICE,
        "mem.hugepages.pool_shrunk",
    )


def test_failed_claims_of_one_call_name_each_other(driver: Driver) -> None:
    first, second = driver.report(
        message(
            "PrepareOutcome",
            claim=claim("a"),
            failed=True,
            evidence=[driver_error(BAD_CONFIG, "no such mode")],
        ),
        message("PrepareOutcome", claim=claim("b"), failed=True, evidence=[errno(28, CDI)]),
    )
    assert "ns/b (transient cdi.write)" in first.verdict.text
    assert "ns/a (bad-config config.invalid)" in second.verdict.text


def test_failed_claims_of_one_pods_drivers_name_each_other(short_tmp: Path, sysfs: PlainSysfs) -> None:  # noqa: F811
    """The kubelet's checkpoint has the claims of a pod before it calls the pod's drivers."""
    other, kubelet_dir = "other.example.com", short_tmp / "kubelet"
    kubelet_dir.mkdir()
    claims = [saved_claim(f"uid-{name}", name=name, namespace="ns", pods=["pod-1"]) for name in "ab"]
    (kubelet_dir / CLAIMS_FILE).write_bytes(checkpoint(claims))
    wrong = driver_error(BAD_CONFIG, "no such mode")
    with start(short_tmp, "--driver", other, "--kubelet-dir", str(kubelet_dir)) as agent:
        first, second = Driver(agent), Driver(agent, other)
        assert "other drivers" not in first.report_failure(claim("a"), wrong).verdict.text
        named = f"Failing claims of the pod's other drivers: ns/a ({DRIVER} bad-config config.invalid)."

        def is_named() -> bool:
            return named in second.report_failure(claim("b"), wrong).verdict.text

        eventually(is_named, "the pod tracker has read the checkpoint")
        [cached] = first.check(claim("a"))
        assert f"ns/b ({other} bad-config config.invalid)" in cached.verdict.text


def test_failed_unprepare_of_a_broken_device_has_no_verdict(driver: Driver) -> None:
    driver.declare(pages("huge-0", 4))
    driver.report_failure(claim("a", "huge-0"), driver_error(FAILED_DEVICE, "it is dead", device="huge-0"))
    unprepare = 2
    assert driver.report_failure(claim("a"), errno(5), step=unprepare).verdict.code == ""
    assert driver.report_failure(claim("b"), errno(5), step=unprepare).verdict.code != ""


def test_prepares_file_contains_reported_failure(driver: Driver) -> None:
    driver.report_failure(claim("a"), driver_error(BAD_CONFIG, "no such mode"))
    driver.wait_saved("no such mode")


def test_agent_ends_although_the_disk_of_a_driver_hangs(agent: Agent, driver: Driver) -> None:
    driver.ledger.parent.mkdir(parents=True)
    with held_lock(driver.ledger.with_suffix(".json.new")):
        driver.report_failure(claim("a"), driver_error(BAD_CONFIG, "no such mode"))
        assert agent.end() == 0
    assert f"shutdown: ledger writer of {DRIVER} did not stop in time; abandoning its thread" in agent.log

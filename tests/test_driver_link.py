"""A driver beside a real agent: what it says over its socket, and who hears what of it then."""

import fcntl
import signal
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
    hear,
    hear_health,
    short_tmp,  # noqa: F401  # a fixture
)
from patience import PATIENCE_S
from wire.google import Watcher, message_class, names
from wire.serving import eventually

CONFIG = '[stream]\nlease = "3s"\n[taints]\nquiet = "0s"\n'


def m(kind: str, /, **fields: Any) -> Any:
    """A message of the driver's."""
    return message_class("drahealth.v1.DriverLink", kind)(**fields)


def pages(name: str, count: int, **fields: Any) -> Any:
    """A device of so many hugepages."""
    return m("DeclaredDevice", name=name, hugepages=m("HugepagesPart", size="2Mi", pages=count), **fields)


def claim(name: str, *devices: str, fingerprint: str = "") -> Any:
    """A claim of these devices."""
    given = [m("ClaimedDevice", request="r", pool="node-1", device=device) for device in devices]
    return m(
        "PrepareClaim", namespace="ns", name=name, uid=f"uid-{name}", devices=given, fingerprint=fingerprint
    )


def errno(number: int, operation: int = 0, text: str = "") -> Any:
    return m("Evidence", errno=m("Errno", number=number, operation=operation, text=text))


def word(error_class: int, summary: str, **fields: Any) -> Any:
    return m("Evidence", word=m("DriverWord", error_class=error_class, summary=summary, **fields))


BAD_CONFIG, FAILED_DEVICE = 2, 3
CDI = 2


class Driver:
    """A driver on the other end of the socket, in Google's words."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def __call__(self, method: str, request: Any, reply: str) -> Any:
        """One call, on a connection of its own."""
        with grpc.insecure_channel(
            f"unix:{self.agent.health_socket}", [("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            call = channel.unary_unary(
                f"/drahealth.v1.DriverLink/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=message_class("drahealth.v1.DriverLink", reply).FromString,
            )
            return call(request, timeout=PATIENCE_S)

    def declare(self, *devices: Any) -> Any:
        return self("SyncDevices", m("SyncDevicesRequest", devices=devices), "SyncDevicesReply")

    def check(self, *claims: Any) -> Sequence[Any]:
        return self("CheckClaims", m("CheckClaimsRequest", claims=claims), "CheckClaimsReply").answers

    def classify(self, *evidence: Any, of: Any = None) -> Any:
        return self("Classify", m("ClassifyRequest", claim=of, evidence=evidence), "ClassifyReply").verdict

    def report(self, *outcomes: Any, step: int = 1) -> Sequence[Any]:
        request = m("ReportPrepareRequest", step=step, outcomes=outcomes)
        return self("ReportPrepare", request, "ReportPrepareReply").answers

    def failed(self, of: Any, *evidence: Any, step: int = 1) -> Any:
        """The answer to one claim that could not be prepared."""
        [answer] = self.report(m("PrepareOutcome", claim=of, failed=True, evidence=evidence), step=step)
        return answer

    def went_well(self, of: Any, step: int = 1) -> Any:
        [answer] = self.report(m("PrepareOutcome", claim=of), step=step)
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


def test_what_is_declared_is_what_the_kubelet_hears_from_then_on(agent: Agent, driver: Driver) -> None:
    with agent.kubelet() as kubelet:
        assert "cpu-node0" in names(kubelet.next())
        reply = driver.declare(pages("huge-0", 4), pages("huge-1", 4, pool="rack-1"))
        assert (reply.devices, reply.judged) == (2, True)
    with agent.kubelet() as kubelet:
        first = kubelet.next()
        assert [(one.device.pool_name, one.device.device_name, one.health) for one in first.devices] == [
            ("node-1", "huge-0", HEALTHY),
            ("rack-1", "huge-1", HEALTHY),
        ]


def test_a_declared_device_is_judged_by_what_it_is_made_of(
    agent: Agent, driver: Driver, sysfs: PlainSysfs
) -> None:
    driver.declare(pages("huge-0", 8))
    with agent.kubelet() as kubelet:
        hear_health(kubelet, "huge-0", HEALTHY)
        sysfs.resize(6)
        said = hear_health(kubelet, "huge-0", UNHEALTHY)
    assert said.message.startswith("mem.hugepages.pool_shrunk: 6 pages of 2mi on node 0, 8 declared")


def test_declarations_outlive_the_agent(agent: Agent, driver: Driver, short_tmp: Path) -> None:  # noqa: F811
    driver.declare(pages("huge-0", 4))
    agent.end(signal.SIGKILL)
    with start(short_tmp) as again, again.kubelet() as kubelet:
        assert names(kubelet.next()) == ["huge-0"]


def test_a_device_that_is_taken_back_is_waited_for_no_longer(agent: Agent, driver: Driver) -> None:
    """It is Unknown for a while, and told as such; the answer is about those that the driver has."""
    driver.declare(pages("huge-0", 4), pages("huge-1", 4))
    for rest in ([pages("huge-1", 4)], []):
        reply = driver.declare(*rest)
        assert (reply.devices, reply.judged) == (len(rest), True)
        with agent.kubelet() as kubelet:
            assert {one.device.device_name: one.health for one in kubelet.next().devices} == {
                "huge-0": UNKNOWN,
                "huge-1": HEALTHY if rest else UNKNOWN,
            }


def test_a_driver_that_has_no_devices_is_told_of_none_also_after_a_restart(
    agent: Agent,
    driver: Driver,
    short_tmp: Path,  # noqa: F811
) -> None:
    assert driver.declare().judged
    with agent.kubelet() as kubelet:
        driver.declare(pages("huge-0", 4))
        assert names(kubelet.next()) == ["huge-0"]  # the first list: of nothing there is none
    driver.declare()
    agent.end(signal.SIGKILL)
    with start(short_tmp) as again, again.kubelet() as kubelet:
        Driver(again).declare(pages("huge-1", 4))
        assert names(kubelet.next()) == ["huge-1"]


def test_a_declaration_that_is_wrong_is_refused_by_name_and_costs_nothing(
    agent: Agent, driver: Driver
) -> None:
    driver.declare(pages("huge-0", 4))
    with pytest.raises(grpc.RpcError) as caught:
        driver.declare(pages("huge-0", 4), pages("Huge-1", 4))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'Huge-1' is no DNS label" in caught.value.details()
    with agent.kubelet() as kubelet:
        assert names(kubelet.next()) == ["huge-0"]


def test_a_file_that_the_operator_wrote_is_not_replaced(agent: Agent, driver: Driver) -> None:
    file = agent.directory / "run" / "devices.d" / f"{DRIVER}.toml"
    eventually(file.parent.is_dir, "the directory")
    file.write_text("version = 1\n")
    with pytest.raises(grpc.RpcError) as caught:
        driver.declare(pages("huge-0", 4))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details().startswith(f"{file}: not written by drahealth")


def test_an_error_is_classified_by_its_numbers_and_nothing_follows(agent: Agent, driver: Driver) -> None:
    driver.declare(pages("huge-0", 4))
    said = driver.classify(errno(28, CDI, "write /var/run/cdi/x.json: no space left on device"))
    assert (said.error_class, said.code) == (1, "cdi.write")
    assert said.text.startswith("[class=transient code=cdi.write")
    said = driver.classify(word(FAILED_DEVICE, "it is dead", device="huge-0"), of=claim("a", "huge-0"))
    assert said.error_class == FAILED_DEVICE
    assert driver.check(claim("a", "huge-0"))[0].verdict.code == ""
    with agent.kubelet() as kubelet:
        assert [one.health for one in kubelet.next().devices] == [HEALTHY]


def test_a_device_that_a_prepare_found_broken_is_unhealthy_and_tainted_when_the_answer_comes(
    agent: Agent, driver: Driver
) -> None:
    driver.declare(pages("huge-0", 4), pages("huge-1", 4))
    with driver.taints() as taints:
        hear(taints, lambda one: [list(each.taints) for each in one.devices] == [[], []], "no taints")
        answer = driver.failed(
            claim("a", "huge-0"), word(FAILED_DEVICE, "no page can be had", device="huge-0", code="huge.dead")
        )
        assert answer.uid == "uid-a"
        assert answer.verdict.code == "huge.dead"
        assert [one.device for one in answer.verdict.devices] == ["huge-0"]
        with agent.kubelet() as kubelet:
            [dead, well] = kubelet.next().devices
            assert (dead.health, well.health) == (UNHEALTHY, HEALTHY)
            assert "huge.dead: no page can be had" in dead.message
        told = hear(taints, lambda one: one.devices[0].taints, "a taint")
        [taint] = told.devices[0].taints
        assert (taint.effect, taint.key.split("/")[0]) == (2, DRIVER)
        assert taint.time_added_s > 0
        assert not told.devices[1].taints
        assert driver.went_well(claim("a", "huge-0")).verdict.code == ""
        hear(taints, lambda one: not one.devices[0].taints, "the taint is gone")


def test_what_a_prepare_found_outlives_the_agent(agent: Agent, driver: Driver, short_tmp: Path) -> None:  # noqa: F811
    driver.declare(pages("huge-0", 4))
    driver.failed(claim("a", "huge-0"), word(FAILED_DEVICE, "it is dead", device="huge-0"))
    agent.end(signal.SIGKILL)
    with start(short_tmp) as again, again.kubelet() as kubelet:
        assert kubelet.next().devices[0].health == UNHEALTHY
        assert Driver(again).check(claim("a", "huge-0"))[0].verdict.error_class == FAILED_DEVICE


def test_a_claim_that_can_never_be_had_is_refused_without_trying_until_it_changes(driver: Driver) -> None:
    asked = claim("a", fingerprint="1")
    said = driver.failed(asked, word(BAD_CONFIG, "mode 'x' is none of a, b")).verdict
    [answer] = driver.check(asked)
    assert answer.verdict.text == said.text
    assert answer.verdict.count == 1
    assert driver.check(claim("a", fingerprint="2"))[0].verdict.code == ""


def test_an_unhealthy_device_is_known_against_its_claims(
    agent: Agent, driver: Driver, sysfs: PlainSysfs
) -> None:
    driver.declare(pages("huge-0", 8))
    with agent.kubelet() as kubelet:
        sysfs.resize(6)
        hear_health(kubelet, "huge-0", UNHEALTHY)
    well, sick = driver.check(claim("a"), claim("b", "huge-0"))
    assert well.verdict.code == ""
    assert (sick.verdict.error_class, sick.verdict.code) == (FAILED_DEVICE, "mem.hugepages.pool_shrunk")


def test_claims_of_one_call_that_failed_name_one_another(driver: Driver) -> None:
    one, other = driver.report(
        m("PrepareOutcome", claim=claim("a"), failed=True, evidence=[word(BAD_CONFIG, "no such mode")]),
        m("PrepareOutcome", claim=claim("b"), failed=True, evidence=[errno(28, CDI)]),
    )
    assert "ns/b (transient cdi.write)" in one.verdict.text
    assert "ns/a (bad-config config.invalid)" in other.verdict.text


def test_an_unprepare_of_a_broken_device_is_to_succeed(driver: Driver) -> None:
    driver.declare(pages("huge-0", 4))
    driver.failed(claim("a", "huge-0"), word(FAILED_DEVICE, "it is dead", device="huge-0"))
    unprepare = 2
    assert driver.failed(claim("a"), errno(5), step=unprepare).verdict.code == ""
    assert driver.failed(claim("b"), errno(5), step=unprepare).verdict.code != ""


def test_people_see_what_a_driver_reported(agent: Agent, driver: Driver) -> None:
    driver.failed(claim("a"), word(BAD_CONFIG, "no such mode"))
    file = agent.directory / "run" / "state" / "drivers" / DRIVER / "prepares.json"
    assert "no such mode" in file.read_text()


def test_the_agent_ends_though_a_links_disk_hangs(agent: Agent, driver: Driver) -> None:
    state = agent.directory / "run" / "state" / "drivers" / DRIVER
    state.mkdir(parents=True)
    with (state / "prepares.json.new").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # whoever writes there waits
        driver.failed(claim("a"), word(BAD_CONFIG, "no such mode"))
        assert agent.end() == 0
    assert f"what writes the prepares of {DRIVER} hangs and is left behind" in agent.log

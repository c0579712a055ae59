"""HTML page of the HTTP server: its content, its endpoints, and what a real Chromium shows."""

import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from agents import PlainSysfs, short_tmp
from http_agents import FakeAgent, listening_agent, running_report, serve_app
from http_client import connect, get
from no_threads import no_threads
from patience import PATIENCE_S
from wire.serving import at, device, eventually, report, unhealthy

from agent.config.config import Config
from agent.devices.consumers.consumer_map import pod_consumer
from agent.health.availability_statistics import ObservedTimeAxis, verdict_spans
from agent.http.app import HEADERS, STREAMS_MAX, RenderTurns
from agent.http.page_content import PODS_MAX, ROWS_MAX, STRIP_STEPS, History, PageInput, page_content
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import AllocatedDevice, Origin, OwnerReference, PodObject, PodRef, Provenance
from agent.model.consumers import (
    ClaimConsumerEdge,
    ClaimView,
    ConsumerMap,
    ContainerEdge,
    DeviceEdge,
    PodView,
    Relation,
)
from agent.model.health import Blame, Cause, NonDeviceCause, Repair, Severity
from agent.model.history import (
    ClockReading,
    ObservedPeriod,
    RecordedState,
    RecordedVerdict,
    StoredVerdicts,
    VerdictChange,
)
from agent.model.pod_findings import PodsSample
from agent.model.reading import SourceSample, SourceState
from agent.model.report import AgentStatus, Report
from agent.model.settings import UsageHistoryLimits
from agent.model.time import NS
from agent.store.history_file import HistoryFile, read_verdicts

__all__ = ["short_tmp"]

HOUR = 3600.0
CPU = DeviceRef("", "node-a", "cpu-node0")
STATUS = AgentStatus("1.2.3", 1, 1_700_000_000.0, 2.5, 40 << 20, 9, 60)
SCRIPT = "<script>document.title='x'</script>"


def cause(code: str = "cpu.offline", severity: Severity = Severity.UNHEALTHY, **more: Any) -> Cause:
    return Cause(code, severity, Blame.HARDWARE, "CPU 1", "put it online", at(1), **more)


def history(*changes: tuple[float, RecordedState], lasted_h: float = 30.0) -> History:
    """Return a history of ``lasted_h`` hours, with changes as (hours after its begin, state)."""
    now = ClockReading(1_700_000_100.0, 200 * HOUR, "boot")
    period = ObservedPeriod("p", "boot", now.boot_s - lasted_h * HOUR, lasted_h * HOUR, now.wall_s)
    stored = StoredVerdicts(
        (period,),
        tuple(
            VerdictChange("p", number, CPU, None, RecordedVerdict(state), 0.0, hours * HOUR)
            for number, (hours, state) in enumerate(changes)
        ),
    )
    timeline = ObservedTimeAxis(stored.periods, now)
    return History(timeline, verdict_spans(stored, timeline))


def page_input(shown: Report, **changes: Any) -> PageInput:
    empty = PageInput(shown, at(100), None, None, (), history(), STATUS)
    return replace(empty, **changes)


@pytest.fixture
def fake() -> FakeAgent:
    agent = FakeAgent()
    agent.now = at(2)
    agent.change(status=lambda: STATUS, config=lambda: Config(node_name="node-a", history_rows=0))
    return agent


# --- content -----------------------------------------------------------------------------------------------


def test_worst_devices_come_first_and_are_counted() -> None:
    devices = [
        device("a"),
        device("b", severity=Severity.DEGRADED),
        device("c", severity=Severity.UNKNOWN),
        unhealthy("d"),
        device("e", severity=Severity.INFO),
    ]
    page = page_content(page_input(report(devices)))
    assert [row.name for row in page.rows] == ["d", "c", "b", "e", "a"]
    assert [(count.devices, count.state.word) for count in page.counts] == [
        (1, "Unhealthy"),
        (1, "Unknown"),
        (1, "Degraded"),
        (2, "Healthy"),
    ]


def test_pages_of_many_devices_show_each_device_once() -> None:
    devices = [device(f"cpu-{number:04}") for number in range(2 * ROWS_MAX + 1)]
    pages = [page_content(page_input(report(devices)), first) for first in (0, ROWS_MAX, 2 * ROWS_MAX)]
    assert [row.name for page in pages for row in page.rows] == [device.device for device in devices]
    assert [page.previous for page in pages] == ["", "first=0", f"first={ROWS_MAX}"]
    assert [page.following for page in pages] == [f"first={ROWS_MAX}", f"first={2 * ROWS_MAX}", ""]
    beyond = page_content(page_input(report(devices)), 10**9)
    assert [row.name for row in beyond.rows] == [devices[-1].device]


def test_pods_of_a_device_are_named_and_bounded() -> None:
    source = SourceSample("pods", SourceState.OK, 0, NS, 0, "")
    served = DeviceRef("cpu.example.com", "node-a", "cpu-node0")
    uses = {f"uid-{number:02}": (served,) for number in range(PODS_MAX + 2)}
    pods = PodsSample(source, uses, {"uid-00": "team-a/train-0"})
    row = page_content(page_input(report([device()]), pods=pods, drivers={"cpu.example.com"})).rows[0]
    assert row.pods[0].name == "pod UID uid-01"
    assert len(row.pods) == PODS_MAX
    assert row.more_pods == 2


def test_pods_of_a_device_have_their_claims_owners_and_possible_uses() -> None:
    ref = ClaimRef("team-a", "gpus", "c-1")
    served = DeviceRef("cpu.example.com", "node-a", "cpu-node0")
    fact = Provenance(Origin.CHECKPOINT, at(1))
    train = PodRef("team-a", "train-0", "p-1")
    job = OwnerReference("batch/v1", "Job", "train", "j-1", controller=True)
    certain = PodView(train, ((PodObject(train, owners=(job,)), fact),))
    possible = PodView(PodRef("team-a", "wait-0", "p-2"), running=False)
    device_edge = DeviceEdge(ref, AllocatedDevice(served, ("r",)), Relation.PREPARED, fact)
    consumers = tuple(
        ClaimConsumerEdge(ref, pod_consumer(pod.ref), relation, fact)
        for pod, relation in ((possible, Relation.RESERVED), (certain, Relation.PREPARED))
    )
    containers = (ContainerEdge(ref, certain.ref, "main", (), fact),)
    known = ConsumerMap(
        claims={ref: ClaimView(ref, (device_edge,), consumers, containers)},
        pods={certain.ref: certain, possible.ref: possible},
        devices={served: (ref,)},
    )
    uses = PodsSample(
        SourceSample("pods", SourceState.OK, 0, NS, 0, ""), {"p-1": (served,)}, {"p-1": "team-a/train-0"}
    )
    row = page_content(
        page_input(report([device()]), pods=uses, consumers=known, drivers={"cpu.example.com"})
    ).rows[0]
    assert [(pod.name, pod.facts, pod.is_certain) for pod in row.pods] == [
        ("team-a/train-0", "claim team-a/gpus, container main, Job train", True),
        ("team-a/wait-0", "claim team-a/gpus, no process", False),
    ]


@pytest.mark.parametrize(
    ("pods", "problem"),
    [
        (None, "the agent does not track the pods of this node"),
        (
            PodsSample(SourceSample("pods", SourceState.FAILING, 0, NS, 3, "kubelet.sock: refused")),
            "the source pods is failing: kubelet.sock: refused",
        ),
    ],
)
def test_pods_that_are_not_known_have_their_reason(pods: PodsSample | None, problem: str) -> None:
    assert page_content(page_input(report([device()]), pods=pods)).pods_problem == problem


def test_strip_shows_states_of_a_day_and_time_that_was_not_observed() -> None:
    shown = history(
        (0, RecordedState.HEALTHY), (18, RecordedState.UNHEALTHY), (24, RecordedState.HEALTHY), lasted_h=30
    )
    strip = page_content(page_input(report([device()]), history=shown)).rows[0].strip
    assert strip is not None
    assert [(part.begin, part.width, part.css) for part in strip.parts] == [
        (0, STRIP_STEPS // 2, "healthy"),
        (STRIP_STEPS // 2, STRIP_STEPS // 4, "unhealthy"),
        (STRIP_STEPS * 3 // 4, STRIP_STEPS // 4, "healthy"),
    ]
    assert strip.text == "Healthy 18h, Unhealthy 6h"


def test_strip_shows_a_stop_of_the_agent_as_not_observed() -> None:
    now = ClockReading(1_700_000_000.0, 200 * HOUR, "boot")
    periods = (
        ObservedPeriod("a", "boot", 176 * HOUR, 6 * HOUR, 0.0),
        ObservedPeriod("b", "boot", 188 * HOUR, 12 * HOUR, now.wall_s),
    )
    change = VerdictChange("a", 0, CPU, None, RecordedVerdict(RecordedState.HEALTHY), 0.0, 0.0)
    timeline = ObservedTimeAxis(periods, now)
    shown = History(timeline, verdict_spans(StoredVerdicts(periods, (change,)), timeline))
    strip = page_content(page_input(report([device()]), history=shown)).rows[0].strip
    assert strip is not None
    assert [(part.begin, part.width, part.css) for part in strip.parts] == [
        (0, STRIP_STEPS, "healthy"),
        (STRIP_STEPS // 4, STRIP_STEPS // 4, "unobserved"),
    ]
    assert strip.text == "Healthy 18h, not observed 6h"


def test_short_fault_is_visible_in_the_strip() -> None:
    shown = history(
        (0, RecordedState.HEALTHY), (20, RecordedState.UNHEALTHY), (20.001, RecordedState.HEALTHY)
    )
    strip = page_content(page_input(report([device()]), history=shown)).rows[0].strip
    assert strip is not None
    assert [part.width for part in strip.parts if part.css == "unhealthy"] == [1]


def test_device_without_record_has_no_strip() -> None:
    assert page_content(page_input(report([device()]))).rows[0].strip is None


# --- endpoints ---------------------------------------------------------------------------------------------


def test_page_before_the_first_report_is_503_with_the_reason(fake: FakeAgent) -> None:
    with serve_app(fake.app) as server:
        answer = get(server.addresses[0], "/")
    assert answer.status == 503
    assert "The first pass over the node has not finished" in answer.text


def test_page_of_a_stalled_agent_states_the_age_of_the_report(fake: FakeAgent) -> None:
    fake.view.latest.publish(report([device()], second=2))
    with serve_app(fake.app) as server:
        assert "does not report" not in get(server.addresses[0], "/").text
        fake.now = at(33)
        page = get(server.addresses[0], "/").text
        assert "The agent does not report: the newest health report is 31 s old, limit 30 s." in page
        fake.view.latest.publish(report([device()], second=33))
        assert "does not report" not in get(server.addresses[0], "/").text


def test_page_is_shown_while_the_disk_of_the_history_hangs(
    fake: FakeAgent, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def read(path: Path) -> StoredVerdicts:
        assert goes_on.wait(PATIENCE_S)
        return StoredVerdicts()

    monkeypatch.setattr("agent.http.app.read_verdicts", read)
    monkeypatch.setattr("agent.http.app.READ_WAIT_S", 0.01)
    fake.change(config=lambda: Config(node_name="node-a", history_rows=10))
    fake.view.latest.publish(report([device()]))
    with serve_app(fake.app) as server:
        for _ in range(3):
            page = get(server.addresses[0], "/").text
            assert "No history: its file is still being read." in page
            fake.view.latest.publish(report([device()]))
        goes_on.set()

        def is_read() -> bool:
            fake.view.latest.publish(report([device()]))
            return "no record yet" in get(server.addresses[0], "/").text

        eventually(is_read, "the history")


def test_page_without_a_thread_for_the_history_names_the_reason(
    fake: FakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.http.app.READ_WAIT_S", PATIENCE_S)
    fake.change(
        config=lambda: Config(node_name="node-a", history_rows=10), history_file=tmp_path / "h.sqlite"
    )
    fake.view.latest.publish(report([device()]))
    with serve_app(fake.app) as server:
        with no_threads():
            assert "No history: can&#39;t start new thread" in get(server.addresses[0], "/").text
        fake.view.latest.publish(report([device()], second=3))
        assert "new thread" not in get(server.addresses[0], "/").text


def test_page_is_shown_although_the_status_of_the_process_cannot_be_read(fake: FakeAgent) -> None:
    reason = "status of the agent's process: cannot be read: too many open files"
    fake.change(status=lambda: reason)
    fake.view.latest.publish(report([device("gpu-7")]))
    with serve_app(fake.app) as server:
        page = get(server.addresses[0], "/")
    assert page.status == 200
    assert "gpu-7" in page.text
    assert "cannot be read: too many open files" in page.text


def test_request_above_the_limit_of_pages_that_wait_is_refused(
    fake: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes, metrics and the report are answered meanwhile, and later all that wait."""
    goes_on = threading.Event()

    def read(path: Path) -> StoredVerdicts:
        assert goes_on.wait(PATIENCE_S)
        return StoredVerdicts()

    monkeypatch.setattr("agent.http.app.read_verdicts", read)
    monkeypatch.setattr("agent.http.app.READ_WAIT_S", PATIENCE_S)
    monkeypatch.setattr("agent.http.app.WAITING_MAX", 2)
    fake.change(config=lambda: Config(node_name="node-a", history_rows=10))
    fake.view.latest.publish(running_report(100, [device(f"cpu-node{number}") for number in range(600)]))
    with serve_app(fake.app) as server, ExitStack() as stack:
        address = server.addresses[0]
        firsts = [0, 200] * 20 + [400]
        clients = [stack.enter_context(connect(address)) for _ in firsts]
        for client, first in zip(clients, firsts, strict=True):
            client.sendall(b"GET /?first=%d HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % first)
            if client in (clients[1], clients[-2]):
                for _ in range(3):  # until the server has read what was sent before
                    assert get(address, "/healthz").status == 200
        refused = clients[-1]
        text = refused.recv(65_536).decode()
        assert text.startswith("HTTP/1.1 503")
        assert "retry-after: 5\r\n" in text
        for path in ("/healthz", "/metrics", "/api/v1/report"):
            assert get(address, path).status == 200
        goes_on.set()
        for client in clients:
            assert client is refused or client.recv(65_536).startswith(b"HTTP/1.1 200")
        assert get(address, "/").status == 200


def test_scrape_does_not_wait_for_the_turn_of_a_page(
    fake: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [0.0, 3600.0]  # the first document, a page, takes an hour of CPU time

    def clock() -> float:
        return times.pop(0) if times else 3600.0

    monkeypatch.setattr("agent.http.app.RenderTurns", partial(RenderTurns, clock))
    fake.view.latest.publish(report([device()]))
    with serve_app(fake.app) as server, connect(server.addresses[0]) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: not times, "the rendered page")
        for path in ("/metrics", "/api/v1/report"):
            assert get(server.addresses[0], path).status == 200


def test_all_parts_of_a_report_are_rendered_once(fake: FakeAgent) -> None:
    rendered: list[int] = []

    def status() -> AgentStatus:
        rendered.append(1)
        return STATUS

    fake.change(status=status)
    fake.view.latest.publish(report([device(f"gpu-{n}") for n in range(4096)]))
    with serve_app(fake.app) as server:
        for _ in range(2):
            for first in range(0, 4096, ROWS_MAX):
                assert get(server.addresses[0], f"/?first={first}").status == 200
    assert len(rendered) == 21


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("PRAGMA user_version = 99", "format version 99"),
        ("DROP TABLE verdicts", "no such table"),
        ("BEGIN EXCLUSIVE", "locked by the agent"),
    ],
    ids=["newer", "damaged", "locked"],
)
def test_page_names_the_reason_why_the_history_cannot_be_read(
    fake: FakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, words: str
) -> None:
    path = tmp_path / "history.sqlite"
    HistoryFile(path, UsageHistoryLimits()).write_verdicts((), (), 0.0, delete_by_age=False)
    monkeypatch.setattr("agent.http.app.read_verdicts", partial(read_verdicts, wait_s=0.01))
    monkeypatch.setattr("agent.http.app.READ_WAIT_S", PATIENCE_S)
    fake.change(config=lambda: Config(node_name="node-a", history_rows=10), history_file=path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db, serve_app(fake.app) as server:
        db.execute(statement)
        fake.view.latest.publish(report([device()]))
        assert words in get(server.addresses[0], "/").text


def test_page_and_files_have_a_strict_policy_and_no_inline_code(fake: FakeAgent) -> None:
    fake.view.latest.publish(report([device()]))
    with serve_app(fake.app) as server:
        answers = [get(server.addresses[0], path) for path in ("/", "/page.css", "/page.js", "/icon.svg")]
    for answer in answers:
        assert answer.status == 200
        assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    page = answers[0].text
    assert "style=" not in page
    assert page.count("<script") == 1
    assert "http:" not in page + answers[1].text + answers[2].text
    assert "https:" not in page + answers[1].text + answers[2].text


def test_texts_of_devices_pods_and_sources_are_never_markup(fake: FakeAgent) -> None:
    bad = replace(cause(code=SCRIPT), evidence=SCRIPT, advice=SCRIPT)
    sick = unhealthy(SCRIPT, SCRIPT)._replace(
        causes=(bad,), driver=SCRIPT, kind=SCRIPT, attributes=((SCRIPT, SCRIPT),)
    )
    source = SourceSample(SCRIPT, SourceState.FAILING, 0, NS, 1, SCRIPT)
    shown = Report(SCRIPT, at(1), (sick,), notes=(NonDeviceCause(SCRIPT, bad, (SCRIPT,)),), sources=(source,))
    fake.view.latest.publish(shown)
    with serve_app(fake.app) as server:
        page = get(server.addresses[0], "/").text
    assert SCRIPT not in page
    assert page.count("&lt;script&gt;") >= 12


@pytest.mark.parametrize("query", ["-1", "x", "²", "9" * 400, "1e3"])
def test_query_that_is_no_number_shows_the_first_devices(fake: FakeAgent, query: str) -> None:
    fake.view.latest.publish(report([device()]))
    with serve_app(fake.app) as server:
        assert "cpu-node0" in get(server.addresses[0], f"/?first={quote(query)}").text


EVENTS = b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n"


@contextmanager
def all_event_streams(address: Any) -> Iterator[None]:
    """Open as many event streams as the server has."""
    with ExitStack() as clients:
        for _ in range(STREAMS_MAX):
            client = clients.enter_context(connect(address))
            client.sendall(EVENTS)
            received = b""
            while b"data: 1" not in received:
                received += client.recv(4096)
        yield


def test_event_streams_above_the_limit_are_refused_and_ended_ones_free(fake: FakeAgent) -> None:
    fake.view.latest.publish(report([device()]))
    with serve_app(fake.app) as server:
        address = server.addresses[0]
        with all_event_streams(address):
            answer = get(address, "/events")
            assert (answer.status, answer.text) == (503, f"{STREAMS_MAX} event streams are open, the limit\n")
            assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]

        def is_free() -> bool:
            with connect(address) as client:
                client.sendall(EVENTS)
                return client.recv(12).endswith(b"200")

        eventually(is_free, "a free stream")


def test_head_of_the_event_stream_ends_and_takes_no_stream(fake: FakeAgent) -> None:
    fake.view.latest.publish(report([device()]))
    with serve_app(fake.app) as server, connect(server.addresses[0]) as client:
        for _ in range(STREAMS_MAX + 1):  # one connection, as a proxy has it
            client.sendall(b"HEAD /events HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while b"\r\n\r\n" not in received:
                received += client.recv(4096)
            assert received.startswith(b"HTTP/1.1 200")
            assert b"content-type: text/event-stream" in received


# --- Chromium ----------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(None in CHROMIUM, reason="no chromium with chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


class Browser:
    """Chromium with an empty profile."""

    def __init__(self) -> None:
        from selenium import webdriver

        program, server = CHROMIUM
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        options = webdriver.ChromeOptions()
        for flag in (*FLAGS, f"--user-data-dir={self._profile.name}"):
            options.add_argument(flag)
        options.binary_location = program or ""
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(server))
        self.driver.set_page_load_timeout(PATIENCE_S)

    def close(self) -> None:
        self.driver.quit()
        self._profile.cleanup()

    def load(self, url: str) -> None:
        """Load a page, and forget the messages of the last one."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(url)

    def run(self, script: str) -> Any:
        """Return the value of a script."""
        return self.driver.execute_script(script)

    def text(self) -> str:
        """Return the visible text."""
        return self.run("return document.body.innerText")

    def media(self, name: str, value: str) -> None:
        """Set a media feature of the browser."""
        features = [{"name": name, "value": value}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    try:
        yield browser
    finally:
        browser.close()


@pytest.mark.slow
@needs_chromium
def test_caused_fault_appears_in_chromium_without_reload(short_tmp: Any, browser: Browser) -> None:
    """A real agent, whose machine loses hugepages while the page is open."""
    sysfs = PlainSysfs(short_tmp / "sys")
    with listening_agent(short_tmp, sysfs) as (_, port):
        browser.load(f"http://127.0.0.1:{port}/")
        browser.run("window.isSamePage = true")
        eventually(lambda: "live" in browser.text(), "the event stream")
        assert "mem.hugepages" not in browser.text()
        sysfs.resize(5)
        eventually(lambda: "mem.hugepages.pool_shrunk" in browser.text(), "the fault on the page")
        assert browser.run("return window.isSamePage")
        assert browser.driver.get_log("browser") == []


@pytest.mark.slow
@needs_chromium
def test_open_details_and_focus_outlast_a_new_report(fake: FakeAgent, browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    fake.view.latest.publish(report([device(), unhealthy("gpu-0")]))
    with serve_app(fake.app) as server:
        browser.load("http://{}:{}/".format(*server.addresses[0]))
        eventually(lambda: "live" in browser.text(), "the event stream")
        summary = browser.driver.find_element("css selector", "summary")
        browser.run("document.querySelector('summary').focus()")
        summary.send_keys(Keys.ENTER)
        assert browser.run("return document.querySelector('details').open")
        fake.view.latest.publish(report([device(), unhealthy("gpu-0"), unhealthy("gpu-1")]))
        eventually(lambda: "gpu-1" in browser.text(), "the new device")
        assert browser.run("return document.getElementById('device:/node-a/gpu-0').open")
        assert browser.run("return document.activeElement.innerText") == "gpu-0"


@pytest.mark.slow
@needs_chromium
def test_page_without_an_event_stream_names_the_time_between_updates(
    fake: FakeAgent, browser: Browser
) -> None:
    fake.view.latest.publish(report([device()]))
    with serve_app(fake.app) as server, all_event_streams(server.addresses[0]):
        browser.load("http://{}:{}/".format(*server.addresses[0]))
        eventually(lambda: "updated every 30 s" in browser.text(), "the refusal of the stream")
        browser.run("return load()")
        assert "updated every 30 s" in browser.text()
    browser.run("load()")
    eventually(lambda: "no connection to the agent" in browser.text(), "the end of the server")


@pytest.mark.slow
@needs_chromium
def test_page_runs_no_injected_script_and_fits_a_narrow_window(fake: FakeAgent, browser: Browser) -> None:
    long = unhealthy("gpu-" + "x" * 200)._replace(
        causes=(replace(cause(repair=Repair.REBOOT_NODE), evidence=f"{SCRIPT} <img src=x onerror=alert(1)>"),)
    )
    fake.view.latest.publish(report([long, device()]))
    with serve_app(fake.app) as server:
        browser.driver.set_window_size(500, 800)
        try:
            browser.load("http://{}:{}/".format(*server.addresses[0]))
            assert SCRIPT in browser.text()
            assert browser.driver.title == "node-a: 1 Unhealthy, 1 Healthy"
            assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
            assert browser.driver.get_log("browser") == []
        finally:
            browser.driver.set_window_size(1280, 900)


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_enough_contrast_in_each_colour_scheme(
    fake: FakeAgent, browser: Browser, scheme: str
) -> None:
    """Contrast of at least 4.5 to the background, as WCAG 2 (level AA) requires."""
    states = [device(str(level), severity=level, causes=(cause(severity=level),)) for level in Severity]
    fake.view.latest.publish(report(states))
    with serve_app(fake.app) as server:
        browser.media("prefers-color-scheme", scheme)
        browser.load("http://{}:{}/".format(*server.addresses[0]))
        found = browser.run(CONTRASTS)
    assert len(found) > 20
    assert [text for text, contrast in found if contrast < 4.5] == []
    assert browser.run("return matchMedia('(prefers-color-scheme: dark)').matches") is (scheme == "dark")


CONTRASTS = """
const light = (colour) => {
  const parts = colour.match(/[0-9.]+/g).slice(0, 3).map((c) => c / 255);
  const [r, g, b] = parts.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (one) => {
  const colour = getComputedStyle(one).backgroundColor;
  return colour === "rgba(0, 0, 0, 0)" && one.parentElement ? ground(one.parentElement) : colour;
};
return [...document.querySelectorAll("main *")]
  .filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .filter((one) => !one.closest("svg"))
  .map((one) => {
    const [a, b] = [light(getComputedStyle(one).color), light(ground(one))];
    return [one.outerHTML.slice(0, 80), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  });
"""

"""Metrics of the agent: their table, their limits, both formats, and what a real Prometheus makes of them."""

import re
import subprocess
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import metrics_page
import pytest
from agents import UNHEALTHY, PlainSysfs, run_command, short_tmp, wait_for_health
from http_agents import FakeAgent, cause, full_agent, listening_agent
from http_client import connect, get
from hypothesis import given
from hypothesis import strategies as st
from paper_gpus import GpuNode
from prometheus import Prometheus, need
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString
from wire.serving import at, device, eventually, report, unhealthy

from agent.http.agent_view import TotalsSinceStart
from agent.http.metric_families import CODES_MAX, DEVICE_FAMILIES, DEVICES_MAX, FAMILIES, TIME_FAMILIES
from agent.http.metrics import MetricsRenderer
from agent.model.gpu import GpuField, NvmlReturnCode
from agent.model.health import Health, NonDeviceCause, Severity
from agent.model.history import STATE_OF_SEVERITY, USABLE
from agent.model.reading import DURATION_BOUNDS_S, SourceSample, SourceState
from agent.model.time import NS, Instant

__all__ = ["short_tmp"]

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def scrape(fake: FakeAgent, accept: str = "") -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return all series of a scrape by name and labels."""
    text = renderer(fake).render(accept).text.decode()
    parse = parse_openmetrics if accept else text_string_to_metric_families
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def renderer(fake: FakeAgent) -> MetricsRenderer:
    return MetricsRenderer(fake.view, lambda: fake.now)


def value(fake: FakeAgent, name: str, **labels: str) -> float | None:
    """Return the value of the only series with these labels; None: there is none."""
    wanted = set(labels.items())
    found = [number for (known, its), number in scrape(fake).items() if known == name and wanted <= its]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.fixture
def full() -> FakeAgent:
    return full_agent()


@pytest.mark.parametrize("accept", ["", OPENMETRICS], ids=["text", "openmetrics"])
def test_scrape_has_every_family_of_the_table_and_no_other(full: FakeAgent, accept: str) -> None:
    rest = {"drahealth_metrics_dropped_series"}
    names = {re.sub(r"(pass_seconds)_(bucket|sum|count)$", r"\1", name) for name, _ in scrape(full, accept)}
    ours = {name for name in names if not name.startswith("process_")}
    assert ours == {family.series_name for family in FAMILIES} - rest
    assert "process_resident_memory_bytes" in names
    for name, labels in scrape(full, accept):
        family = next((found_family for found_family in FAMILIES if found_family.series_name == name), None)
        assert family is None or {label for label, _ in labels} == set(family.series_labels)


@pytest.mark.parametrize("version", ["abc", "1.x", "²"])
def test_unknown_version_in_accept_gives_the_plain_text_format(full: FakeAgent, version: str) -> None:
    accept = f"application/openmetrics-text; version={version}"
    assert renderer(full).render(accept).content_type.startswith("text/plain; version=0.0.4;")


def test_first_example_of_the_page_prints_its_line_of_a_real_scrape() -> None:
    """The example is a scrape through grep(1), and one series that grep prints."""
    found = re.search(r"/metrics \| (grep '.*')\n(.*)\n", metrics_page.PAGE.read_text())
    assert found is not None
    fake = FakeAgent()
    fake.publish(report([device("gpu-2"), unhealthy("gpu-3")._replace(pool="node-7")]))
    text = renderer(fake).render("").text
    ended = subprocess.run(found[1], shell=True, input=text, capture_output=True, check=False)
    assert ended.stdout.decode().splitlines() == [found[2]]


def test_page_has_the_tables_of_all_families() -> None:
    text = metrics_page.PAGE.read_text()
    assert text == metrics_page.page(text), "run tools/metrics_page.py --write"
    assert all(f"`{family.series_name}`" in text for family in FAMILIES)


def test_promtool_accepts_the_metrics(full: FakeAgent) -> None:
    checked = subprocess.run(
        [need("promtool"), "check", "metrics"],
        input=renderer(full).render("").text,
        capture_output=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_fault_of_a_gpu_is_a_state_a_finding_and_a_counted_xid(full: FakeAgent) -> None:
    gpu = {"device": "gpu-1"}
    assert value(full, "drahealth_device_health", **gpu, drahealth_device_health="unhealthy") == 1
    assert value(full, "drahealth_device_finding", **gpu, code="gpu.xid.79", severity="unhealthy") == 1
    assert value(full, "drahealth_gpu_xids_total", **gpu, xid="79") == 2
    assert value(full, "drahealth_findings", scope="pod", code="cgroup.y") == 1


def test_gpu_that_a_driver_declares_keeps_its_series(full: FakeAgent) -> None:
    report = full.view.report()
    assert report is not None
    own = next(device for device in report.devices if device.device == "gpu-1")
    declared = own._replace(driver="gpu.example.com", device="gpu-x")
    full.publish(replace(report, devices=(*report.devices, declared)))
    assert value(full, "drahealth_gpu_xids_total", device="gpu-1", xid="79") == 2
    assert value(full, "drahealth_gpu_xids_total", device="gpu-x") is None


def gpu_agent(node: GpuNode) -> FakeAgent:
    """Return an agent that shows the GPUs of a node."""
    fake = FakeAgent()
    fake.change(snapshot=lambda: node.snapshot())
    fake.publish(node.rest(5))
    return fake


def test_readings_of_a_hung_gpu_are_left_out_but_its_xids_are_not() -> None:
    node = GpuNode(2, readings={GpuField.TEMP: 40, GpuField.LINKS_UP: 3})
    for number in node.gpus:
        node.change(number, links=2)
    node.nvml_xid(0, 13)
    fake = gpu_agent(node)
    node.hang(0)
    fake.publish(node.rest(60))
    fake.now = node.now
    assert value(fake, "drahealth_device_health", device="gpu-0", drahealth_device_health="unhealthy") == 1
    for name in ("drahealth_gpu_temperature_celsius", "drahealth_gpu_nvlinks_up"):
        assert value(fake, name, device="gpu-0") is None
        assert value(fake, name, device="gpu-1") is not None
    assert value(fake, "drahealth_gpu_xids_total", device="gpu-0", xid="13") == 1


def test_xids_are_counted_over_starts_of_the_nvml_process() -> None:
    node = GpuNode(1)
    node.nvml_xid(0, 13)
    fake = gpu_agent(node)
    for _ in range(2):
        node.change(0, xids=(), status=NvmlReturnCode.UNINITIALIZED)  # no process runs
        fake.publish(node.rest(10))
        assert value(fake, "drahealth_gpu_xids_total", xid="13") == 1
    node.change(0, status=NvmlReturnCode.OK)
    node.nvml_xid(0, 13)
    for _ in range(2):
        fake.publish(node.rest(10))
        assert value(fake, "drahealth_gpu_xids_total", xid="13") == 2


def test_xids_of_a_full_list_that_drops_entries_never_decrease() -> None:
    node = GpuNode(1)
    node.nvml_xid(0, 13, times=3)
    node.nvml_xid(0, 31)
    fake = gpu_agent(node)
    node.change(0, xids=node.gpus[0].xids[1:])
    fake.publish(node.rest(10))
    assert value(fake, "drahealth_gpu_xids_total", xid="13") == 3
    node.nvml_xid(0, 13)
    fake.publish(node.rest(10))
    assert value(fake, "drahealth_gpu_xids_total", xid="13") == 4
    assert value(fake, "drahealth_gpu_xids_total", xid="31") == 1


def test_pass_durations_are_a_histogram_per_source_with_passes(full: FakeAgent) -> None:
    name = "drahealth_source_pass_seconds"
    assert {dict(labels)["source"] for known, labels in scrape(full) if known.startswith(name)} == {"nvml"}
    buckets = [value(full, f"{name}_bucket", le=floatToGoString(bound)) for bound in DURATION_BOUNDS_S]
    assert buckets == [0, 5, *[6] * 9, 8]
    assert (value(full, f"{name}_count"), value(full, f"{name}_sum")) == (8, 12.5)


def test_metric_of_an_unknown_value_is_left_out() -> None:
    fake = FakeAgent()
    assert value(fake, "drahealth_build_info") == 1
    assert value(fake, "drahealth_reports_total") == 0
    assert value(fake, "drahealth_report_timestamp_seconds") is None
    assert value(fake, "drahealth_config_last_reload_successful") is None
    assert value(fake, "drahealth_devices", state="healthy") is None
    node = GpuNode(1, readings={GpuField.TEMP: 40})
    fake.change(snapshot=lambda: node.snapshot())
    fake.publish(node.rest(5))
    assert value(fake, "drahealth_gpu_temperature_celsius", sensor="gpu") == 40
    assert value(fake, "drahealth_gpu_temperature_celsius", sensor="memory") is None


def test_sick_devices_stay_above_the_limit_and_the_others_are_counted() -> None:
    fake = FakeAgent()
    devices = [device(f"d-{number}") for number in range(DEVICES_MAX + 9)]
    fake.publish(report([*devices, unhealthy("sick")]))
    assert value(fake, "drahealth_device_health", device="sick", drahealth_device_health="unhealthy") == 1
    assert value(fake, "drahealth_devices", state="healthy") == DEVICES_MAX + 9
    dropped = "drahealth_metrics_dropped_series"
    counts = Counter(name for name, _ in scrape(fake))
    for family in DEVICE_FAMILIES, TIME_FAMILIES:
        for name in (
            series.series_name for series in family if series.series_name != "drahealth_device_finding"
        ):
            per_device, rest = divmod(counts[name], DEVICES_MAX)
            assert (value(fake, dropped, family=name), rest) == (10 * per_device, 0), name
    shown = {labels for known, labels in scrape(fake) if known == "drahealth_device_info"}
    assert len(shown) == DEVICES_MAX


def test_codes_above_the_limit_are_counted() -> None:
    fake = FakeAgent()
    notes = tuple(NonDeviceCause("node", cause(f"node.x{number}")) for number in range(CODES_MAX + 3))
    fake.publish(replace(report(), notes=notes))
    assert value(fake, "drahealth_metrics_dropped_series", family="drahealth_findings") == 3


def test_changed_verdict_replaces_the_kept_text_of_devices() -> None:
    fake = FakeAgent()
    kept = renderer(fake)
    for second, shown in enumerate((device(), unhealthy(), device()), start=1):
        fake.now = Instant((100 + 5 * second) * NS, 0.0)
        fake.publish(report([shown], second=second))
        state = STATE_OF_SEVERITY[shown.severity]
        assert (
            f'drahealth_device_health="{state}",driver="",pool="node-a"}} 1.0'
            in kept.render("").text.decode()
        )
    assert 'device_transitions_total{device="cpu-node0",driver="",pool="node-a",to="healthy"} 1.0' in (
        kept.render("").text.decode()
    )


def test_clients_within_a_second_share_one_text() -> None:
    fake = FakeAgent()
    fake.publish(report([device()]))
    kept = renderer(fake)
    assert kept.render("").text is kept.render("text/plain").text
    first = kept.render("").text
    fake.now = Instant(fake.now.mono_ns + NS, 0.0)
    assert kept.render("").text is not first


def test_clients_of_any_version_and_escaping_share_two_texts(full: FakeAgent) -> None:
    kept = renderer(full)
    texts = [kept.render(accept) for accept in ("", OPENMETRICS)]
    for version in ("1.0.0", "1.0.1", "2.0", "99"):
        for escaping in ("allow-utf-8", "underscores", "dots", "values", "odd"):
            wish = f"version={version};escaping={escaping}"
            for name, text in zip(("text/plain", "application/openmetrics-text"), texts, strict=True):
                given = kept.render(f"{name};{wish}")
                assert given.text is text.text
                assert given.content_type == text.content_type
    assert "version=0.0.4" in texts[0].content_type
    assert "version=1.0.0" in texts[1].content_type


@given(st.lists(st.tuples(st.integers(1, 100), st.sampled_from(Severity)), min_size=1, max_size=20))
def test_times_in_states_sum_up_to_the_observed_time(steps: list[tuple[int, Severity]]) -> None:
    totals, second, states = TotalsSinceStart(), 0, []
    for seconds, severity in steps:
        second += seconds
        totals.handle_report(report([device(severity=severity)], second=second))
        states.append(STATE_OF_SEVERITY[severity])
    (found,) = totals.read().devices.values()
    assert sum(found.seconds(at(second + 7).mono_ns).values()) == pytest.approx(second + 7 - steps[0][0])
    changes = sum(before is not after for before, after in pairwise(states))
    assert sum(found.transitions.values()) == changes
    lost = [before in USABLE and after not in USABLE for before, after in pairwise(states)]
    assert found.losses == sum(lost)


def test_device_between_unhealthy_and_unknown_is_lost_once() -> None:
    fake = FakeAgent()
    for second, severity in enumerate(
        (Severity.DEGRADED, Severity.UNHEALTHY, Severity.UNKNOWN, Severity.UNHEALTHY), start=1
    ):
        fake.publish(report([device(severity=severity)], second=second))
    assert value(fake, "drahealth_device_losses_total") == 1
    assert value(fake, "drahealth_device_transitions_total", to="unhealthy") == 2


def test_time_in_state_does_not_decrease_if_scraped_before_the_report() -> None:
    """The report of second 7 is published after the scrape of second 10."""
    fake = FakeAgent()
    found = []
    for second, now, shown in (
        (1, 2, device()),
        (5, 10, device()),
        (7, 12, unhealthy()),
        (9, 14, unhealthy()),
    ):
        fake.publish(report([shown], second=second))
        fake.now = at(now)
        found.append(
            [
                value(fake, "drahealth_device_health_seconds_total", state=state)
                for state in ("healthy", "unhealthy")
            ]
        )
    assert found == [[0, None], [4, None], [6, 0], [6, 2]]


def test_stall_of_a_source_is_counted_once_until_it_ends() -> None:
    totals = TotalsSinceStart()
    for second, state in enumerate(
        [SourceState.STALLED] * 3 + [SourceState.OK, SourceState.STALLED], start=1
    ):
        source = SourceSample("cpus", state, 1, NS, 0, "")
        totals.handle_report(replace(report(second=second), sources=(source,)))
    assert totals.read().stalls == {"cpus": 2}


# --- the whole agent ---------------------------------------------------------------------------------------


def test_prometheus_scrapes_the_agent_and_a_query_returns_the_fault(short_tmp: Path) -> None:
    need("prometheus")
    sysfs = PlainSysfs(short_tmp / "sys")
    with (
        listening_agent(short_tmp, sysfs) as (_, port),
        Prometheus(short_tmp, [f"127.0.0.1:{port}"]) as server,
    ):
        server.wait_for("up == 1")
        server.wait_for('drahealth_devices{state="healthy"} == 3')
        assert server.query('drahealth_device_health{drahealth_device_health="unhealthy"} == 1') == []
        sysfs.resize(4)
        (sick,) = server.wait_for('drahealth_device_health{drahealth_device_health="unhealthy"} == 1')
        assert sick["metric"]["device"] == "hugepages-2mi-node0"
        finding = 'drahealth_device_finding{code!="source.stalled"}'  # of a busy machine
        (found,) = server.wait_for(finding)
        assert found["metric"]["code"] == "mem.hugepages.pool_shrunk"
        sysfs.resize(8)
        server.wait_for('increase(drahealth_device_transitions_total{to="healthy"}[5m]) > 0')
        server.wait_for(f"absent({finding})")
        # what the agent does in Python, in the sampler and in the machine watch
        for source in ("devices.d", "cpus", "memory"):
            server.wait_for(f'drahealth_source_pass_seconds_count{{source="{source}"}} > 0')


def test_record_that_cannot_be_written_is_in_metrics_and_status(short_tmp: Path) -> None:
    record, sysfs = short_tmp / "record", PlainSysfs(short_tmp / "sys")
    record.mkdir()
    record.chmod(0o777)
    with listening_agent(short_tmp, sysfs, "--record-dir", str(record)) as (_, port):
        address, name = ("127.0.0.1", port), "drahealth_file_write_failed"
        eventually(lambda: f'{name}{{file="record"}} 1.0' in get(address, "/metrics").text, "a failed write")
        for file in ("faults", "history"):
            assert f'{name}{{file="{file}"}} 0.0' in get(address, "/metrics").text
        shown = run_command("status", "--runtime-dir", str(short_tmp / "run")).stdout
        assert f"not written  record: {record}: directory {record} has mode 0777" in shown


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_open_address_without_password_is_logged(short_tmp: Path, host: str, is_open: bool) -> None:
    with listening_agent(short_tmp, PlainSysfs(short_tmp / "sys"), host=host) as (agent, port):
        assert (f"no TLS and no password on {host}:{port}" in agent.log) is is_open


def test_100_scrapers_that_do_not_read_delay_no_verdict(short_tmp: Path) -> None:
    """The verdict reaches the kubelet while no scraper has read a byte."""
    sysfs = PlainSysfs(short_tmp / "sys")
    with ExitStack() as clients, listening_agent(short_tmp, sysfs) as (agent, port):
        kubelet = clients.enter_context(agent.kubelet())
        for _ in range(100):
            client = clients.enter_context(connect(("127.0.0.1", port), receive_buffer=4096))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
        for pages, health in ((4, UNHEALTHY), (8, int(Health.HEALTHY))):
            sysfs.resize(pages)
            wait_for_health(kubelet, "hugepages-2mi-node0", health)
        readable = connect(("127.0.0.1", port))
        clients.enter_context(readable)
        readable.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = bytearray()
        eventually(lambda: not received.extend(readable.recv(1 << 16)) and b"# TYPE" in received, "a scrape")

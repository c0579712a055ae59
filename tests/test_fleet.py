"""``drahealth fleet`` with a real Prometheus server that scrapes 200 simulated nodes, and bad servers."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
from http_agents import FakeAgent
from patience import PATIENCE_S
from prometheus import Prometheus
from reserved_ports import reserved_port
from test_prometheus_rules import promtool_test
from wire.serving import eventually

from agent.cli.fleet.command import fleet_document
from agent.cli.fleet.fleet_state import (
    FLAPS,
    REPORT_S,
    FleetDeviceId,
    MetricSample,
    PrometheusClient,
    read_fleet,
)
from agent.cli.main import main
from agent.config.config import Config
from agent.health.state_machine import HEALTH_OF_SEVERITY
from agent.http.metrics import MetricsRenderer
from agent.model.gpu import NvmlSample
from agent.model.health import Blame, Cause, DeviceHealth, NonDeviceCause, Repair, Severity
from agent.model.reading import Absence, Missing, SourceSample, SourceState
from agent.model.report import Report
from agent.model.snapshot import CpuSetsSample, Snapshot
from agent.model.time import NS, Instant
from agent.version import VERSION

ABSENT: Final = Missing(Absence.ABSENT)
NODES: Final = 200
SCRAPED_S: Final = 3 * PATIENCE_S
"""Longest wait until each node was scraped in time [s]; 200 answers are much for a busy machine."""
GPUS: Final = 8
DRIVER: Final = "gpu.example.com"
BEGIN_S: Final = 1_700_000_000
OLD_VERSION: Final = "0.0.9"
OLD: Final = frozenset({"node-001", "node-002"})
"""Nodes with agents of the old version, and with a note about the node."""


def cause(code: str, severity: Severity, repair: Repair = Repair.NONE) -> Cause:
    return Cause(code, severity, Blame.HARDWARE, "", "", Instant(1, BEGIN_S), repair=repair)


LOST: Final = cause("gpu.xid.79", Severity.UNHEALTHY, Repair.REBOOT_NODE)
SICK: Final = {
    ("node-007", "gpu-3"): (BEGIN_S + 70, (LOST,)),
    ("node-042", "gpu-0"): (BEGIN_S + 420, (LOST,)),
    ("node-042", "gpu-1"): (BEGIN_S + 400, (cause("gpu.unresponsive", Severity.UNKNOWN),)),
    ("node-100", "gpu-5"): (
        BEGIN_S + 100,
        (cause("gpu.ecc.correctable_rate", Severity.DEGRADED), cause("gpu.clocks", Severity.INFO)),
    ),
}
"""Time and causes of the devices that are not healthy."""
FLAPPING: Final = ("node-150", "gpu-2")
STUCK: Final = ("node-150", "gpu-4")
"""Device that is lost once, and moves between Unhealthy and Unknown before it is usable again."""


AT: Final = re.compile(rb"(\ndrahealth_report_timestamp_seconds )[^\n]*")
"""Time of the newest report in the metrics of an agent."""


class SimulatedNode(FakeAgent):
    """Agent of one node, with the metrics of an agent."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        library = SourceSample("nvml", SourceState.OK, 0, NS, 0, "")
        nvml = NvmlSample((), library, library, driver="580.95.05")
        snapshot = Snapshot(0, CpuSetsSample(ABSENT, ABSENT, ABSENT), gpus=nvml)
        self.change(snapshot=lambda: snapshot, config=lambda: Config(node_name=name))
        self.show()
        self.text = self.render()

    def show(self, sick: dict[tuple[str, str], tuple[int, tuple[Cause, ...]]] = SICK) -> None:
        """Publish a report in which these devices are sick."""
        devices = []
        for number in range(GPUS):
            device = f"gpu-{number}"
            since_s, causes = sick.get((self.name, device), (BEGIN_S, ()))
            severity = max((cause.severity for cause in causes), default=Severity.OK)
            health, since = HEALTH_OF_SEVERITY[severity], Instant(1, since_s)
            devices.append(
                DeviceHealth(
                    self.name, device, "gpu", health, severity, "", since, since, 30, causes, driver=DRIVER
                )
            )
        pressure = NonDeviceCause("node", cause("node.pressure.io", Severity.DEGRADED))
        notes = (pressure,) if self.name in OLD else ()
        self.publish(Report(self.name, self.now, tuple(devices), notes))

    def flap(self, times: int) -> None:
        """Lose a device and get it back; another one is lost all the time, with two causes in turn."""
        unread = cause("gpu.unresponsive", Severity.UNKNOWN)
        for _ in range(times):
            self.show({FLAPPING: (BEGIN_S, (LOST,)), STUCK: (BEGIN_S, (LOST,))})
            self.show({STUCK: (BEGIN_S, (unread,))})
        self.show()
        self.text = self.render()

    def render(self) -> bytes:
        text = MetricsRenderer(self.view, lambda: self.now).render("").text
        version = OLD_VERSION if self.name in OLD else VERSION
        return text.replace(f'version="{VERSION}"'.encode(), f'version="{version}"'.encode())


class Exporter:
    """HTTP server with the metrics of all simulated nodes, one path for each."""

    def __init__(self) -> None:
        names = (f"node-{number:03}" for number in range(NODES))
        self.nodes = {f"/{name}": SimulatedNode(name) for name in names}
        nodes = self.nodes

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                node = nodes.get(self.path)
                text = b"" if node is None else AT.sub(rb"\g<1>%d" % time.time(), node.text)
                self.send_response(200 if text else 503)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = NODES  # Prometheus connects to all of them while a busy machine accepts none

        self.server = Server(("127.0.0.1", 0), Handler)

    def scrape_config(self) -> dict[str, object]:
        """Return the keys of Prometheus' scrape configuration: a target for each node."""
        address = f"127.0.0.1:{self.server.server_port}"
        labels = (
            {"__metrics_path__": path, "instance": node.name, "cluster": "a"}
            for path, node in self.nodes.items()
        )
        return {
            "scrape_interval": "20s",
            "scrape_timeout": "20s",  # a busy machine is no silent node
            "static_configs": [{"targets": [address], "labels": label} for label in labels],
        }


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a Prometheus server that has scraped all nodes, and later one less."""
    exporter = Exporter()
    with exporter.server:
        threading.Thread(target=exporter.server.serve_forever, daemon=True).start()
        try:
            directory = tmp_path_factory.mktemp("prometheus")
            with Prometheus(directory, (), scrape=exporter.scrape_config()) as server:
                server.wait_for(f"count(drahealth_build_info) == {NODES}", SCRAPED_S)
                exporter.nodes[f"/{FLAPPING[0]}"].flap(FLAPS + 1)
                server.wait_for(f"drahealth_device_losses_total == {FLAPS + 1}", SCRAPED_S)
                del exporter.nodes["/node-199"]
                server.wait_for(f"count(drahealth_build_info) == {NODES - 1}", SCRAPED_S)
                yield "http://{}:{}".format(*server.address)
        finally:
            exporter.server.shutdown()


def fleet(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return the document that the command prints."""
    assert main(["fleet", *arguments, "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def whole_fleet(capsys: pytest.CaptureFixture[str], url: str, *arguments: str, nodes: int = NODES - 1) -> Any:
    """Return the document once its nodes were scraped: a late answer is that of a silent node for a while."""
    documents: list[Any] = []

    def is_whole() -> bool:
        documents[:] = [fleet(capsys, "--prometheus", url, *arguments)]
        return bool(documents[0]["nodes"] == nodes)

    eventually(is_whole, lambda: f"{nodes} nodes: {documents}", SCRAPED_S)
    return documents[0]


def test_sick_devices_of_all_nodes_are_worst_and_newest_first(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = whole_fleet(capsys, url)
    found = [(device["node"], device["device"], device["state"]) for device in document["sick"]]
    assert found == [
        ("node-042", "gpu-0", "unhealthy"),
        ("node-007", "gpu-3", "unhealthy"),
        ("node-042", "gpu-1", "unknown"),
        ("node-100", "gpu-5", "degraded"),
    ]
    first = document["sick"][0]
    assert (first["driver"], first["pool"], first["since"]) == (DRIVER, "node-042", "2023-11-14T22:20:20Z")
    assert first["causes"] == [{"code": "gpu.xid.79", "severity": "unhealthy", "repair": "reboot-node"}]
    assert [cause["code"] for cause in document["sick"][3]["causes"]] == ["gpu.ecc.correctable_rate"]
    assert document["nodes"] == NODES - 1
    assert document["notScraped"] == ["node-199"]
    healthy = (NODES - 1) * GPUS - len(SICK)
    assert document["devices"] == {"unhealthy": 2, "unknown": 1, "degraded": 1, "healthy": healthy}


def test_flapping_devices_rules_and_versions_are_counted(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = whole_fleet(capsys, url)
    (flapping,) = document["flapping"]
    assert (flapping["node"], flapping["device"]) == FLAPPING
    assert flapping["timesLost"] >= FLAPS
    rules = [(rule["code"], rule["devices"], rule["nodes"]) for rule in document["rules"]]
    assert rules == [
        ("gpu.xid.79", 2, ["node-007", "node-042"]),
        ("gpu.unresponsive", 1, ["node-042"]),
        ("node.pressure.io", 0, ["node-001", "node-002"]),
        ("gpu.ecc.correctable_rate", 1, ["node-100"]),
    ]
    assert document["versions"] == [
        {"name": "drahealth", "version": VERSION, "nodes": NODES - 3},
        {"name": "drahealth", "version": OLD_VERSION, "nodes": 2},
        {"name": "nvidia", "version": "580.95.05", "nodes": NODES - 1},
    ]


@pytest.mark.parametrize(
    ("by", "names"), [("node", ["node-042", "node-007", "node-100"]), ("driver", [DRIVER])]
)
def test_groups_have_their_sick_devices(
    url: str, capsys: pytest.CaptureFixture[str], by: str, names: list[str]
) -> None:
    groups = whole_fleet(capsys, url, "--by", by)["groups"]
    assert [group[by] for group in groups] == names
    counts = {"unhealthy": 1, "unknown": 1, "degraded": 0}
    if by == "driver":
        counts = {"unhealthy": 2, "unknown": 1, "degraded": 1}
    assert {name: groups[0][name] for name in counts} == counts
    assert groups[0]["newest"] == "2023-11-14T22:20:20Z"


def test_selected_labels_restrict_every_query(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = whole_fleet(capsys, url, "--select", 'cluster="b"', nodes=0)
    assert (other["nodes"], other["sick"], other["rules"], other["versions"]) == (0, [], [], [])
    only = whole_fleet(capsys, url, "--select", 'cluster="a",instance=~"node-04."', nodes=10)
    assert {sick["node"] for sick in only["sick"]} == {"node-042"}
    assert only["nodes"] == 10


def test_table_shows_devices_rules_and_versions(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole_fleet(capsys, url)
    assert main(["fleet", "--prometheus", url]) == 0
    out = capsys.readouterr().out
    assert out.startswith("199 nodes, 3 not healthy, 1 without a report; 1,592 devices: 2 unhealthy, ")
    for line in (
        r"✖ node-042 +gpu.example.com/gpu-0 +Unhealthy +\d+d +gpu.xid.79",
        r"✖ gpu.xid.79 +2 +2 +node-007, node-042",
        r"  node-150 +gpu.example.com/gpu-2 +\d times",
        r"  nvidia +580.95.05 +199",
        r"  without a report now: node-199",
    ):
        assert re.search(f"^{line}$", out, re.MULTILINE), line


def test_node_without_a_new_report_is_silent() -> None:
    ages = {"a": 20.0, "b": REPORT_S + 1, "d": 30.0}

    def query(text: str) -> list[MetricSample]:
        if text.startswith("timestamp("):
            return [MetricSample({"instance": node}, age_s) for node, age_s in ages.items()]
        found = {"drahealth_build_info": "abcd", "count by (instance)": "e"}
        return [
            MetricSample({"instance": node}, 1.0)
            for begin, nodes in found.items()
            if text == begin or text.startswith(f"{begin} (max_over_time")
            for node in nodes
        ]

    shown = read_fleet(query, "instance", "")
    assert (shown.nodes, shown.silent) == (("a", "d"), ("b", "c", "e"))


def test_node_whose_agent_has_another_instance_after_an_update_is_scraped(tmp_path: Path) -> None:
    queries: list[str] = []

    def query(text: str) -> list[MetricSample]:
        queries.append(text)
        return []

    read_fleet(query, "instance", 'job="drahealth"')
    (gone,) = (text for text in queries if "max_over_time" in text)
    values = {("1:1", "a"): "1+0x20 stale", ("2:1", "a"): "_x21 1+0x60", ("3:1", "b"): "1+0x20 stale"}
    rows = {
        f'drahealth_build_info{{instance="{instance}",job="drahealth",node_name="{node}"}}': value
        for (instance, node), value in values.items()
    }
    cases = [
        {"expr": gone, "eval_time": time, "exp_samples": samples}
        for time, samples in {
            "10m": [],
            "40m": [{"labels": '{instance="3:1"}', "value": 1}],
        }.items()
    ]
    promtool_test(tmp_path, rows, cases)


@pytest.mark.parametrize("by", ["rule", "node", "driver"])
def test_table_of_groups_replaces_the_devices(url: str, capsys: pytest.CaptureFixture[str], by: str) -> None:
    assert main(["fleet", "--prometheus", url, "--by", by]) == 0
    out = capsys.readouterr().out
    assert f"\n  {by.upper()} " in out
    assert "HEALTH" not in out.replace("UNHEALTHY", "")


def test_refused_query_is_an_error_of_the_server(url: str) -> None:
    with pytest.raises(Exception, match=r"^400 bad_data: .*parse error"):
        PrometheusClient(url).query("(")


# --- other servers ------------------------------------------------------------------------------------------


@contextmanager
def serve_answer(status: int, body: bytes, requests: list[Any] | None = None) -> Iterator[str]:
    """Run a server with one answer to each request; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if requests is not None:
                requests.append((self.path, dict(self.headers)))
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


EMPTY: Final = b'{"status": "success", "data": {"resultType": "vector", "result": []}}'


def test_credentials_are_sent_and_never_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests: list[Any] = []
    with serve_answer(200, EMPTY, requests) as address:
        document = fleet(capsys, "--prometheus", f"http://admin:se%20cret@{address}/prefix/")
        assert document["prometheus"] == f"http://{address}/prefix/"
        assert document["sick"] == []
        path, headers = requests[-1]
        assert (path, headers["Authorization"]) == ("/prefix/api/v1/query", "Basic YWRtaW46c2UgY3JldA==")
        token = tmp_path / "token"
        token.write_text("abc\n")
        fleet(capsys, "--prometheus", f"http://{address}", "--token-file", str(token))
        assert requests[-1][1]["Authorization"] == "Bearer abc"


def test_server_without_agents_is_named_with_what_to_see(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_answer(200, EMPTY) as address:
        assert main(["fleet", "--prometheus", f"http://{address}"]) == 0
    assert "the server has no metrics of agents: see its targets, and --select" in capsys.readouterr().out


def test_node_label_that_no_agent_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    series = b'{"metric": {"instance": "n", "job": "j"}, "value": [1, "1"]}'
    body = b'{"status": "success", "data": {"result": [%b]}}' % series
    with serve_answer(200, body) as address:
        assert main(["fleet", "--prometheus", f"http://{address}", "--node-label", "host"]) == 64
    text = "--node-label host: no agent has this label; name one of instance, job"
    assert text in capsys.readouterr().err


def test_warning_of_the_server_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    body = b'{"status": "success", "data": {"result": []}, "warnings": ["store\\u001b a: timeout"]}'
    with serve_answer(200, body) as address:
        assert main(["fleet", "--prometheus", f"http://{address}"]) == 0
    error = capsys.readouterr().err
    assert error.count("a: timeout; rows may be missing") == 1
    assert "\x1b" not in error


@pytest.mark.parametrize("text", ["", "a b", "a\nb", "a\x00b"])
def test_file_without_a_token_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    token = tmp_path / "token"
    token.write_text(text)
    assert main(["fleet", "--prometheus", "http://h", "--token-file", str(token)]) == 78
    assert f"{token} cannot be used: the file must have one line with a token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"not found", "the server did not answer as the query API: 404 Not Found; check the path"),
        (401, b"Unauthorized", "query API: 401 Unauthorized; check user, password or token"),
        (200, b"<html>", "the server did not answer as the query API: another format"),
        (200, b'{"status": "success", "data": {"result": [{"metric": 1}]}}', "another format"),
        (200, b'{"status": "\xe9"}', "another format"),
        (200, b'{"status": "", "data": {"result": [{"metric": {}, "value": [1, "x"]}]}}', "another format"),
        (503, b'{"status": "error", "errorType": "timeout", "error": "too slow"}', "503 timeout: "),
    ],
    ids=["path", "credentials", "html", "sample", "latin-1", "value", "error"],
)
def test_answer_of_no_prometheus_exits_with_69(
    capsys: pytest.CaptureFixture[str], status: int, body: bytes, words: str
) -> None:
    with serve_answer(status, body) as address:
        assert main(["fleet", "--prometheus", f"http://{address}"]) == 69
    assert words in capsys.readouterr().err


def test_unreachable_server_exits_with_69(capsys: pytest.CaptureFixture[str]) -> None:
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        assert main(["fleet", "--prometheus", f"http://{address}"]) == 69
    assert (
        f"drahealth: Prometheus http://{address}: query not answered: Connection refused"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 70}.b"])
def test_host_with_an_invalid_label_exits_with_69(capsys: pytest.CaptureFixture[str], host: str) -> None:
    assert main(["fleet", "--prometheus", f"http://{host}:1"]) == 69
    assert f"drahealth: Prometheus http://{host}:1: query not answered: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prometheus", "prometheus:9090"], 78, "not a URL of a server, such as http://prometheus:9090"),
        (["--prometheus", "http://h:99999"], 78, "Port out of range"),
        (["--prometheus", "http://a b"], 78, "'http://a b': not a URL of a server"),
        (["--prometheus", "http://a\udcff"], 78, "not a URL of a server"),
        (["--prometheus", "http://u\udcff:p@127.0.0.1:1"], 69, "http://127.0.0.1:1: query not answered"),
        (["--prometheus", "http://u:pa/ss@h:9"], 78, "'...@h:9': not a valid URL: write special characters"),
        (["--prometheus", "http://u:pa#ss@h:9"], 78, "'...@h:9': not a"),
        (["--prometheus", "ftp://u:pass@h"], 78, "'...@h': not a URL of a server"),
        (
            ["--prometheus", "http://h", "--token-file", "/nowhere"],
            78,
            "/nowhere cannot be used: No such file",
        ),
        (["--prometheus", "https://h", "--ca-file", "/nowhere"], 78, "/nowhere cannot be used: No such file"),
        (
            ["--prometheus", "http://h", "--ca-file", "/ca.pem"],
            78,
            "Prometheus http://h: --ca-file has no effect without https:// in the URL",
        ),
        (
            ["--prometheus", "https://h", "--token-file", "/proc/sys/kernel/ostype", "--ca-file", "/nowhere"],
            78,
            "/nowhere cannot be used: No such file",
        ),
        (["--prometheus", "http://h", "--select", "a=b"], 64, "not matchers of labels"),
        (["--prometheus", "http://h", "--select", 'a="b"} or x{y="'], 64, "not matchers of labels"),
        (["--prometheus", "http://h", "--node-label", "a b"], 64, "not the name of a label"),
        ([], 64, "--prometheus"),
    ],
    ids=str,
)
def test_wrong_argument_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert main(["fleet", *arguments]) == code
    error = capsys.readouterr().err
    assert words in error
    assert "u:pa" not in error
    assert "'pa" not in error


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://[::1]", 80), ("https://[fd00::1]/prometheus", 443), ("http://[::1]:9090", 9090)],
)
def test_ipv6_address_without_a_port_has_that_of_its_scheme(url: str, port: int) -> None:
    connection = PrometheusClient(url)._connection()
    assert (connection.host, connection.port) == (url.partition("[")[2].partition("]")[0], port)


@pytest.mark.parametrize("value", [1.7e12, -1e300, -1.0])
def test_impossible_time_of_a_device_is_not_known(value: float) -> None:
    labels = {"instance": "n", "device": "d", "drahealth_device_health": "unhealthy"}

    def query(text: str) -> list[MetricSample]:
        if text.startswith("(drahealth_device_health{"):
            return [MetricSample(labels, 1)]
        return [MetricSample(labels, value)] if "since" in text else []

    document = fleet_document(read_fleet(query, "instance", ""), "http://h", "", [], 0.0)
    assert document["sick"][0]["since"] is None


def test_strange_labels_are_no_error() -> None:
    """An agent of a later version may have other states and severities."""

    def query(text: str) -> list[MetricSample]:
        if text.startswith("(drahealth_device_health{"):
            return [MetricSample({"instance": "n", "device": "d", "drahealth_device_health": "odd"}, 1)]
        if text.startswith("drahealth_device_finding"):
            return [MetricSample({"instance": "n", "device": "d", "code": "x", "severity": "odd"}, 1)]
        return []

    found = read_fleet(query, "instance", "")
    (sick,) = found.sick
    assert (sick.device, sick.severity) == (FleetDeviceId("n", "", "", "d"), Severity.UNKNOWN)
    assert [rule.code for rule in found.rules] == ["x"]

"""The table of a report: any width, with and without colour, any text in messages."""

import re
from dataclasses import replace

import pytest
from cli_reports import (
    BUSY,
    CONTAINED,
    GPUS,
    HIT,
    HUNG,
    LOST,
    NOW_S,
    SHRUNK,
    STOLEN,
    THROTTLED,
    UNREADABLE,
    cause,
    device,
    gpu,
    instant,
    mig_instance,
    report,
    source,
)
from hypothesis import given
from hypothesis import strategies as st

from agent.cli.output.json import status_document
from agent.cli.output.report_text import render_report
from agent.cli.output.terminal import TextStyle, uses_colour
from agent.cli.output.text import (
    BADGES,
    ListEntry,
    clean,
    format_bytes,
    format_count,
    format_entries,
    format_ranges,
)
from agent.cli.status import render_status
from agent.model.gpu import NvmlCallCost, NvmlCosts
from agent.model.health import NonDeviceCause, NotApplicable, Repair, Severity
from agent.model.reading import SourceState
from agent.model.report import (
    AgentStatus,
    ClusterStatus,
    ConfigReload,
    PartsStatus,
    Report,
    SentinelStatus,
    SeverityCount,
    SocketSubscriberCounts,
    StateFile,
    WrittenNodeCondition,
)
from agent.model.snapshot import NativeCoreStats
from agent.model.time import format_age

PLAIN = TextStyle()
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def render(shown: Report, style: TextStyle = PLAIN, now_s: float | None = NOW_S) -> str:
    return render_report(shown, style, now_s=now_s)


def test_device_has_one_row_with_health_ages_and_cause():
    shown = render(report(device("cpu-node0", since_s=7200), device("hugepages-2mi-node0", SHRUNK)))
    assert shown == (
        "worker-7  2 devices: 1 unhealthy, 1 healthy\n"
        "\n"
        "  NAME                 HEALTH     SINCE  VERIFIED  MESSAGE\n"
        "● cpu-node0            Healthy    2h     1s ago\n"
        "✖ hugepages-2mi-node0  Unhealthy  12s    1s ago    "
        "mem.hugepages.pool_shrunk: 500 pages, 512 at start\n"
        "                                                   "
        "→ write the old number to nr_hugepages and read it back; free memory or reboot if it stays short\n"
    )


def test_report_of_one_scan_has_no_ages():
    shown = render(report(device("cpu-node0")), now_s=None)
    assert "  NAME       HEALTH   MESSAGE\n● cpu-node0  Healthy\n" in shown
    assert "ago" not in render(BUSY, now_s=None)


def test_every_severity_has_its_own_sign_and_word():
    badges = [BADGES[s] for s in Severity if s is not Severity.INFO]
    assert set(BADGES) == set(Severity)
    for field in ("sign", "ascii", "word", "colour"):
        assert len({getattr(badge, field) for badge in badges}) == len(badges)


def test_headline_starts_with_the_worst_severity():
    assert render(BUSY).startswith("worker-7  5 devices: 1 unhealthy, 1 unknown, 1 degraded, 2 healthy\n")


def test_table_is_sorted_by_severity_only_on_request():
    names = [
        re.findall(r"^[●▲✖◌] (\S+)", render_report(BUSY, PLAIN, worst_first=w), re.M) for w in (False, True)
    ]
    assert names[0] == [device.device for device in BUSY.devices]
    assert names[1] == [names[0][n] for n in (3, 2, 1, 0, 4)]


def test_headline_without_devices_states_it():
    assert render(report()).startswith("worker-7  no devices\n")


def test_causes_are_all_shown_and_equal_advice_once():
    again = THROTTLED.__class__(
        "cpu.throttled.package", Severity.DEGRADED, THROTTLED.blame, "7 events", THROTTLED.advice, instant(3)
    )
    shown = render(report(device("cpu-node0", THROTTLED, again)))
    assert "cpu.throttled.core: 10 events or more in 60 s" in shown
    assert "cpu.throttled.package: 7 events" in shown
    assert shown.count(THROTTLED.advice) == 1


def test_device_has_one_advice_of_the_cause_that_needs_most():
    def cause(code, severity, repair, advice):
        return replace(SHRUNK, code=code, severity=severity, repair=repair, advice=advice)

    causes = (
        cause("gpu.lost", Severity.UNHEALTHY, Repair.RESET_DEVICE, "reset the GPU"),
        cause("gpu.pcie.width", Severity.DEGRADED, Repair.REPLACE_HARDWARE, "replace the riser"),
        cause("gpu.xid.79", Severity.UNHEALTHY, Repair.REBOOT_NODE, "reboot the node"),
        cause("gpu.ecc.off", Severity.INFO, Repair.NONE, "turn ECC on"),
    )
    shown = render(report(device("gpu-0", *causes)))
    assert shown.count("→ ") == 1
    assert "→ reboot the node\n" in shown
    assert "then, if still reported: reset the GPU; replace the riser" in " ".join(shown.split())
    assert "turn ECC on" not in shown


def test_device_without_causes_shows_its_message():
    sick = device("gpu-0", severity=Severity.UNHEALTHY, message="fell off the bus")
    assert "fell off the bus" in render(report(sick))


def test_info_cause_is_shown_at_a_healthy_device():
    shown = render(report(device("hugepages-2mi-node0", HIT)))
    assert re.search(
        r"● hugepages-2mi-node0 +Healthy.*· cgroup.hugetlb.max_hit: 2MB limit of 64 MiB hit", shown
    )


def test_pool_is_shown_unless_it_is_the_nodes_own():
    mixed = report(device("gpu-0"), device("gpu-0", pool="other"))
    assert re.findall(r"● (\S+)", render(mixed)) == ["gpu-0", "other/gpu-0"]
    from_a_driver = report(device("gpu-0", pool="p"), device("gpu-1", pool="p"), node="")
    assert render(from_a_driver).startswith("p  2 devices")
    assert re.findall(r"● (\S+)", render(from_a_driver)) == ["gpu-0", "gpu-1"]


def test_declared_devices_stand_below_their_driver():
    declared = [
        device("set-0", owner="cpu.example.com"),
        device("set-1", owner="cpu.example.com"),
        device("huge-0", owner="mem.example.com", pool="other"),
    ]
    shown = render(report(device("cpu-node0"), *declared))
    lines = [line[:26].rstrip() for line in shown.partition("MESSAGE\n")[2].splitlines()]
    assert lines == [
        "● cpu-node0  Healthy  12s",
        "  cpu.example.com",
        "● set-0      Healthy  12s",
        "● set-1      Healthy  12s",
        "  mem.example.com, pool ot",
        "● huge-0     Healthy  12s",
    ]


def test_declared_devices_carry_the_driver_when_sorted_by_severity():
    degraded = device("set-0", THROTTLED, owner="cpu.example.com")
    shown = render_report(report(device("cpu-node0"), degraded), PLAIN, worst_first=True)
    assert re.findall(r"^[●▲✖◌] (\S+)", shown, re.MULTILINE) == ["cpu.example.com/set-0", "cpu-node0"]


def test_declared_gpu_is_counted_once_with_one_advice():
    declared = device("h100-0", LOST, owner="gpu.example.com", product="NVIDIA A100-SXM4-40GB")
    shown = render(report(gpu(0, LOST), declared))
    assert "gpus  1 x NVIDIA A100-SXM4-40GB" in shown
    assert shown.count("gpu.lost: NVML returned 15, the GPU is lost\n") == 2
    assert shown.count("→ reboot the node\n") == 1


def test_same_code_with_other_evidence_repeats_the_advice():
    less = replace(SHRUNK, evidence="3 pages, 4 at start")
    shown = render(report(device("hugepages-2mi-node0", SHRUNK), device("hugepages-2mi-node1", less)))
    assert shown.count(SHRUNK.advice) == 2


def test_rules_of_different_devices_have_separate_lines():
    rules = [NotApplicable("gpu-0", "gpu.a", "needs 1 min"), NotApplicable("node", "node.b", "needs 1 min")]
    shown = render(report(not_evaluated=tuple(rules)))
    assert "needs 1 min: gpu.a on gpu-0\n" in shown
    assert "needs 1 min: node.b on node\n" in shown


def test_rules_of_declared_devices_show_only_foreign_pools():
    rules = [NotApplicable(f"cpu.example.com/{pool}/set-0", "cpu.numa", "none") for pool in ("worker-7", "p")]
    shown = render(report(not_applicable=tuple(rules)))
    assert "none: cpu.numa on cpu.example.com/set-0, cpu.example.com/p/set-0\n" in shown


def test_not_applicable_rules_are_grouped_by_reason():
    rules = [NotApplicable(f"cpu-node{n}", code, "no counters") for n in range(4) for code in ("a.b", "a.c")]
    assert "no counters: a.b, a.c on 4 devices\n" in render(report(not_applicable=tuple(rules)))
    assert "no counters: a.b on cpu-node0, cpu-node1\n" in render(report(not_applicable=(rules[0], rules[2])))
    silent = tuple(NotApplicable("gpu-1", f"gpu.{n}", "gpu-1 does not answer") for n in range(30))
    assert "gpu-1 does not answer: 30 rules on gpu-1\n" in render(report(not_evaluated=silent))


def test_working_sources_share_a_line_and_others_have_reasons():
    shown = render(BUSY)
    assert "  sources         cpus, throttle: ok\n" in shown
    assert (
        "hugepages: failing, last read 3s ago, 3 failures, hugepages-1048576kB/nr_hugepages: Input" in shown
    )
    assert "cgroups: absent, no kubepods below /sys/fs/cgroup" in shown
    assert "2 beyond cgroups.max-groups are not" in shown


def test_stalled_source_shows_its_last_read():
    stalled = report(device("cpu-node0"), sources=(source("cpus", SourceState.STALLED),))
    assert "cpus: stalled, last read 3s ago\n" in render(stalled)


def test_notes_have_an_age():
    assert "container 9b1d: cgroup.hugetlb.max_hit: 2MB limit of 64 MiB hit (3m ago)\n" in render(BUSY)


def test_notes_are_sorted_by_severity_and_have_advice():
    notes = (
        NonDeviceCause("pod 1", HIT),
        NonDeviceCause("node", HUNG),
        NonDeviceCause("pod 2", STOLEN),
        NonDeviceCause("pod 3", STOLEN),
    )
    assert render(report(notes=notes)).partition("  NOTES\n")[2] == (
        "▲ node.hung_task: blocked for minutes: dd (60s ago)\n"
        "  → reboot the node\n"
        "▲ pod 2: cgroup.cpu.throttled_exclusive: throttled (12s ago)\n"
        "▲ pod 3: cgroup.cpu.throttled_exclusive: throttled (12s ago)\n"
        "  → take the quota off\n"
        "· pod 1: cgroup.hugetlb.max_hit: 2MB limit of 64 MiB hit (3m ago)\n"
    )


def test_note_names_the_devices_of_its_pod():
    stolen = NonDeviceCause("pod 1", STOLEN, ("cpu.example.com/worker-7/set-0", "cpu.example.com/p/set-0"))
    shown = render(report(notes=(stolen,)), now_s=None)
    assert "throttled (uses cpu.example.com/set-0, cpu.example.com/p/set-0)\n" in shown


def test_container_id_is_cut_to_13_digits():
    stolen = device("cpuset-0", cause("a.b", Severity.DEGRADED, f"pod 1 container {'9b1d' * 16}: throttled"))
    shown = render(report(stolen, notes=(NonDeviceCause(f"pod 1 container {'9b1d' * 16}", HIT),)))
    assert "a.b: pod 1 container 9b1d9b1d9b1d9: throttled\n" in shown
    assert "· pod 1 container 9b1d9b1d9b1d9: cgroup.hugetlb.max_hit: " in shown
    assert render(report(device("gpu-0", message="f" * 65))).endswith("f" * 65 + "\n"), (
        "65 digits are no container ID"
    )


def test_gpu_and_its_instances_show_a_shared_fault_once():
    assert render(GPUS, now_s=None) == (
        "worker-7  21 devices: 9 unhealthy, 12 healthy\n"
        "\n"
        "  NAME           HEALTH     MESSAGE\n"
        "● gpu-0          Healthy    and its 7 instances\n"
        "✖ gpu-1          Unhealthy  gpu.lost: NVML returned 15, the GPU is lost\n"
        "                            → reboot the node\n"
        "                            NVIDIA A100-SXM4-40GB, GPU-00000001, 0000:1c:00.0, serial 1650001\n"
        "                            and its 7 instances\n"
        "● gpu-2          Healthy    and 1 of its 3 instances\n"
        "✖ gpu-2-mig-1-0  Unhealthy  gpu.xid.94: 1 time, row remap pending\n"
        "                            → reset the GPU\n"
        "                            1g.5gb, NVIDIA A100-SXM4-40GB, MIG-21, 0000:1d:00.0, serial 1650002\n"
        "● gpu-2-mig-2-0  Healthy    · gpu.xid.31: 1 time\n"
        "● gpu-3          Healthy\n"
        "\n"
        "  gpus     4 x NVIDIA A100-SXM4-40GB, driver 570.86.15\n"
        "  mig      17 x 1g.5gb\n"
        "  sources  cpus, nvml, gpu-0 to gpu-3, kmsg: ok\n"
        "  cgroups  0 watched\n"
    )


def test_instance_with_more_causes_than_its_gpu_has_a_row():
    shown = render(report(gpu(0, LOST), mig_instance(1, 0, LOST, CONTAINED), mig_instance(2, 0, LOST)))
    assert re.findall(r"✖ (\S+)", shown) == ["gpu-0", "gpu-0-mig-1-0"]
    assert "and 1 of its 2 instances\n" in shown


def test_instance_in_another_state_than_its_gpu_has_a_row():
    worse = render(report(gpu(0), mig_instance(1, 0, UNREADABLE)))
    better = render(report(gpu(0, LOST), mig_instance(1, 0)))
    assert "gpu-0-mig-1-0  Unknown" in worse
    assert "gpu-0-mig-1-0  Healthy" in better


def test_instance_without_its_gpu_in_the_pool_has_a_row():
    other = device("gpu-0", pool="other")
    assert "gpu-0-mig-1-0" in render(report(other, mig_instance(1, 0)))
    assert "gpu-0-mig-1-0" in render(report(mig_instance(1, 0)))


def test_instances_on_a_driver_socket_are_folded_by_message():
    lost = {"severity": Severity.UNHEALTHY, "message": "gpu.lost: it is lost"}
    shown = render(report(device("gpu-0", **lost), device("gpu-0-mig-1-0", **lost), node=""))
    assert "gpu.lost: it is lost\n" in shown
    assert "and its instance\n" in shown
    assert "gpu-0-mig" not in shown


def test_equal_sources_share_a_line_and_a_stalled_one_does_not():
    states = [SourceState.STALLED if n == 9 else SourceState.OK for n in range(16)]
    shown = render(report(gpu(0), sources=tuple(source(f"gpu-{n}", s) for n, s in enumerate(states))))
    assert "  sources  gpu-0 to gpu-8, gpu-10 to gpu-15: ok\n" in shown
    assert "           gpu-9: stalled, last read 3s ago\n" in shown


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a", "b", "c"], "a, b, c"),
        (["gpu-0", "gpu-1"], "gpu-0, gpu-1"),
        (["gpu-9", "gpu-10", "gpu-11"], "gpu-9 to gpu-11"),
        (["gpu-2", "gpu-1", "gpu-0"], "gpu-2, gpu-1, gpu-0"),
        (["gpu-01", "gpu-02", "gpu-03"], "gpu-01, gpu-02, gpu-03"),
        (["a1", "b2", "c3"], "a1, b2, c3"),
        (["cpus", "x1", "x2", "x3", "nvml"], "cpus, x1 to x3, nvml"),
    ],
)
def test_only_consecutive_names_become_a_range(names, text):
    assert format_ranges(names) == text


def test_absent_nvml_has_a_reason_only_without_devices():
    absent = [
        source(name, SourceState.ABSENT, 0, "no such library", vital=False)
        for name in ("nvml", "nvml-events")
    ]
    shown = render(report(device("cpu-node0"), sources=(source("cpus"), *absent)))
    assert "           nvml, nvml-events: absent\n" in shown
    assert "no such library" not in shown
    assert "nvml absent (no such library)" in render(report(sources=tuple(absent)))


def test_absent_library_of_a_configured_path_has_a_reason():
    nvml = source("nvml", SourceState.ABSENT, 0, "/opt/libnvidia-ml.so.1: cannot open", vital=False)
    shown = render(report(device("cpu-node0"), sources=(source("cpus"), nvml)))
    assert "nvml: absent, /opt/libnvidia-ml.so.1: cannot open\n" in shown


def test_absent_uevents_have_a_reason():
    absent = source("uevents", SourceState.ABSENT, 0, "none in this network namespace", vital=False)
    shown = render(report(device("cpu-node0"), sources=(source("cpus"), absent)))
    assert "uevents: absent, none in this network namespace\n" in shown


def test_shared_cause_of_several_devices_has_one_advice():
    shown = render(report(gpu(0, LOST), gpu(1, LOST), gpu(2), gpu(3, LOST)))
    assert shown.count("gpu.lost: NVML returned 15, the GPU is lost\n") == 3
    assert shown.count("→ reboot the node\n") == 1
    assert shown.index("→ reboot the node") < shown.index("GPU-00000000") < shown.index("gpu-1")


def test_footer_ends_with_rules_without_a_result():
    titles = re.findall(r"^  (\w[\w ]*?)  +\S", render(BUSY).partition("NOTES")[2], re.MULTILINE)
    assert titles == ["sources", "cgroups", "not evaluated", "not applicable"]


@pytest.mark.parametrize("width", range(40, 200, 7))
def test_lines_fit_the_terminal(width):
    lines = render(BUSY, TextStyle(width=width)).splitlines()[1:]
    assert max(len(line) for line in lines if line.startswith((" ", "●"))) <= max(width, 56)


def test_lines_are_not_wrapped_without_a_terminal():
    text = " ".join(["word"] * 200)
    sick = device("gpu-0", severity=Severity.UNHEALTHY, message=text)
    assert text in render(report(sick))


def test_narrow_terminal_has_messages_below_devices():
    shown = render(report(device("hugepages-1gi-node0", UNREADABLE)), TextStyle(width=70))
    assert "MESSAGE" not in shown
    assert "\n    mem.hugepages.pool_shrunk.unreadable: nr_hugepages:" in shown


@pytest.mark.parametrize("shown", [BUSY, GPUS])
@pytest.mark.parametrize("width", [None, 60, 120])
def test_colours_change_no_text(shown, width):
    plain, painted = (render(shown, TextStyle(width=width, colour=colour)) for colour in (False, True))
    assert "\x1b[31mUnhealthy\x1b[0m" in painted
    assert ESCAPE.sub("", painted) == plain


def test_every_line_ends_its_colours():
    for line in render(BUSY, TextStyle(width=60, colour=True)).splitlines():
        codes = ESCAPE.findall(line)
        assert codes[1::2] == ["\x1b[0m"] * (len(codes) // 2)
        assert len(codes) % 2 == 0


def test_table_without_unicode_is_ascii():
    assert (render(BUSY, TextStyle(unicode=False)) + render(GPUS, TextStyle(unicode=False))).isascii()


@given(st.text(max_size=80), st.integers(20, 120))
def test_text_with_control_characters_is_cleaned(text, width):
    sick = device(text, severity=Severity.UNHEALTHY, message=text, pool=text, uuid=text, product=text)
    shown = render(report(sick, node=text), TextStyle())
    assert all(line.isprintable() for line in shown.split("\n"))
    assert render(report(sick, node=text), TextStyle(width=width)).replace("\n", "").isprintable()


def test_clean_changes_only_unprintable_characters():
    assert clean("pages: 500 → 512 …") == "pages: 500 → 512 …"
    assert clean("a\x1b[31mb\nc\u202e") == "a\ufffd[31mb\ufffdc\ufffd"


def test_clean_shortens_a_word_of_any_length_to_one_line():
    found = clean(f"pod {'p' * 100_000}/q is gone")
    assert found.startswith("pod pppp")
    assert found.endswith("pppp/q is gone")
    assert " ... " in found
    assert len(found) < 2100
    words = "gpu.xid.79, " * 1000
    assert clean(words) == words


@pytest.mark.parametrize("width", [40, 48, 56, 72])
def test_list_splits_no_finding_code_on_a_narrow_terminal(width):
    code, title = "cgroup.cpu.throttled_exclusive", "not applicable"
    entries = [ListEntry(title, f"no cgroups: {code}, {code} on node"), ListEntry(title, f"{code}: off")]
    for indent in (2, 4):
        lines = list(format_entries(entries, TextStyle(width=width), indent))
        assert sum(line.count(code) for line in lines) == 3
        assert max(map(len, lines)) < width
        assert "".join(lines).count(title) == 1
        assert all(lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0.9, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172_800, "2d")],
)
def test_age_is_short_and_not_negative(seconds, text):
    assert format_age(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (35 << 20, "35.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_size_has_a_binary_unit(size, text):
    assert format_bytes(size) == text


def test_count_agrees_with_its_noun():
    assert [format_count(n, "pass", "passes") for n in (0, 1, 2000)] == ["0 passes", "1 pass", "2,000 passes"]


# --- status ------------------------------------------------------------------------------------------------

STATUS = AgentStatus(
    version="0.1.0",
    pid=42,
    started_wall_s=NOW_S - 1000,
    cpu_s=1.5,
    rss_bytes=33 << 20,
    threads=4,
    descriptors=31,
    node="worker-7",
    at=instant(4),
    publications=12,
    tallies=(SeverityCount(Severity.UNHEALTHY, 1), SeverityCount(Severity.OK, 2)),
    sources=(source("cpus"),),
    core=NativeCoreStats(
        passes=1000, wakes=3, reads=24_000, opens=31, descriptors=29, watches=1, kernel_bytes=49152
    ),
    groups=14,
    subscribers=(
        SocketSubscriberCounts("agent.sock", 1, 1),
        SocketSubscriberCounts("drivers/gpu.example.com.sock", 2, 3),
    ),
)


def test_status_shows_usage_and_subscribers():
    assert render_status(STATUS, PLAIN, now_s=NOW_S) == (
        "worker-7  3 devices: 1 unhealthy, 2 healthy\n"
        "\n"
        "  agent        drahealth 0.1.0, pid 42, up 16m\n"
        "  usage        1.50 s CPU (0.15 % of a CPU), 33.0 MiB, 4 threads, 31 descriptors\n"
        "  core         1,000 passes, 3 wake-ups, 24,000 reads, 31 opens, 29 descriptors, 1 watch, "
        "48.0 KiB in the kernel\n"
        "  reports      12 published, the last 4s ago\n"
        "  subscribers  agent.sock: 1 stream, 1 connection\n"
        "               drivers/gpu.example.com.sock: 2 streams, 3 connections\n"
        "  sources      cpus: ok\n"
        "  cgroups      14 watched\n"
    )


@pytest.mark.parametrize(
    ("reload", "line"),
    [
        (
            ConfigReload(NOW_S - 60, "", ("a.b: 1 to 2", "c: 3 to 4")),
            "reloaded 60s ago: a.b: 1 to 2; c: 3 to 4",
        ),
        (ConfigReload(NOW_S - 60), "reloaded 60s ago: no setting has changed"),
        (
            ConfigReload(NOW_S - 60, "f: bad"),
            "not reloaded 60s ago: f: bad; the configuration in effect stays",
        ),
    ],
)
def test_status_shows_the_last_reload(reload, line):
    shown = " ".join(
        render_status(replace(STATUS, parts=PartsStatus(config_reload=reload)), PLAIN, now_s=NOW_S).split()
    )
    assert f"config {line} subscribers" in shown


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        (
            ClusterStatus(
                "drahealth/drahealth-a",
                "a_1",
                is_held=True,
                requests=7,
                success_wall_s=NOW_S - 4,
                taint_rules=1,
                conditions=(WrittenNodeCondition("DRADevicesHealthy", "True", "AllDevicesHealthy"),),
            ),
            "lease drahealth/drahealth-a held by this agent; DRADevicesHealthy True (AllDevicesHealthy); "
            "1 taint rule; "
            "7 requests, 0 failures, 0 events; last success 4s ago",
        ),
        (
            ClusterStatus("d/l", failures=2, error="lease: no answer", maintenance=("Drained",)),
            "lease d/l held by no agent; in maintenance: Drained; 0 requests, 2 failures, 0 events; "
            "last success never; failing: lease: no answer",
        ),
    ],
)
def test_status_shows_the_work_at_the_api_server(cluster, line):
    shown = " ".join(
        render_status(replace(STATUS, parts=PartsStatus(cluster=cluster)), PLAIN, now_s=NOW_S).split()
    )
    assert f"cluster {line} subscribers" in shown


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (SentinelStatus("/run/c.sock", 3), "3 events, 0 failures at /run/c.sock"),
        (SentinelStatus("/run/c.sock", 0, 2, "no answer"), "0 events, 2 failures; failing: no answer"),
    ],
)
def test_status_shows_the_events_to_nvsentinel(state, line):
    shown = " ".join(
        render_status(replace(STATUS, parts=PartsStatus(nvsentinel=state)), PLAIN, now_s=NOW_S).split()
    )
    assert f"nvsentinel {line} subscribers" in shown


def test_status_shows_the_number_of_lost_snapshots():
    shown = " ".join(
        render_status(replace(STATUS, parts=PartsStatus(lost_snapshots=1040)), PLAIN, now_s=NOW_S).split()
    )
    assert "record 1,040 snapshots lost subscribers" in shown


def test_status_shows_only_files_whose_last_write_failed():
    files = (StateFile("faults", "/state/gpu-faults.json: No space left on device"), StateFile("history"))
    shown = " ".join(
        render_status(replace(STATUS, parts=PartsStatus(files=files)), PLAIN, now_s=NOW_S).split()
    )
    assert "not written faults: /state/gpu-faults.json: No space left on device subscribers" in shown


def test_status_shows_why_nvml_is_absent():
    absent = source("nvml", SourceState.ABSENT, 0, "no NVIDIA driver, GPU or library", vital=False)
    shown = render_status(replace(STATUS, sources=(source("cpus"), absent)), PLAIN, now_s=NOW_S)
    assert "nvml: absent, no NVIDIA driver, GPU or library\n" in shown


def test_status_shows_the_costs_of_nvml():
    calls = (NvmlCallCost("handle", 1, 1e-5, 2e-5), NvmlCallCost("fields", 10, 0.004, 0.02))
    costs = NvmlCosts(cpu_s=STATUS.cpu_s, switches=1200, period_s=3.2, calls=calls)
    uptime_s = NOW_S - STATUS.started_wall_s
    shown = " ".join(
        render_status(replace(STATUS, parts=PartsStatus(nvml=costs)), PLAIN, now_s=NOW_S).split()
    )
    assert (
        f"nvml {100 * STATUS.cpu_s / uptime_s:.2f} % of a CPU, 1,200 context switches; a pass every 3.2 s; "
        "fields 400 µs CPU in 2,000 µs; handle 10 µs CPU in 20 µs"
    ) in shown
    assert status_document(replace(STATUS, parts=PartsStatus(nvml=costs)))["nvml"] == {
        "cpuSeconds": STATUS.cpu_s,
        "contextSwitches": 1200,
        "periodSeconds": 3.2,
        "calls": [
            {"kind": "handle", "calls": 1, "cpuSeconds": 1e-5, "durationSeconds": 2e-5},
            {"kind": "fields", "calls": 10, "cpuSeconds": 0.004, "durationSeconds": 0.02},
        ],
    }


def test_status_of_a_new_agent_has_no_report():
    fresh = AgentStatus("0.1.0", 42, NOW_S, 0.1, 1 << 20, 4, 31)
    assert "no devices\n" in render_status(fresh, PLAIN, now_s=NOW_S)
    assert "  reports  none yet\n" in render_status(fresh, PLAIN, now_s=NOW_S)


# --- colour ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "environ", "is_terminal", "expected"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"TERM": "dumb"}, True, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ("auto", {"FORCE_COLOR": "1", "TERM": "dumb"}, False, True),
        ("always", {"NO_COLOR": "1", "TERM": "dumb"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_colour_depends_on_flag_environment_and_terminal(choice, environ, is_terminal, expected):
    assert uses_colour(choice, environ, is_terminal=is_terminal) is expected

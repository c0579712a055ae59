"""The table: what people see, at any width, with and without colour, whatever a message contains."""

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
    instance,
    instant,
    report,
    source,
)
from hypothesis import given
from hypothesis import strategies as st

from agent.cli.output.fold import fold_names
from agent.cli.output.table import render_report, render_status
from agent.cli.output.terminal import Style, takes_colour
from agent.cli.output.text import LOOKS, clean, format_age, format_bytes, format_count
from agent.model.health import NotApplicable, Note, Severity
from agent.model.report import Report
from agent.model.snapshot import CoreStats
from agent.model.source import SourceState
from agent.model.status import AgentStatus, Subscribers, Tally

PLAIN = Style()
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def render(shown: Report, style: Style = PLAIN, now_s: float | None = NOW_S) -> str:
    return render_report(shown, style, now_s=now_s)


def test_one_line_per_device_with_health_ages_and_cause():
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


def test_a_single_look_has_no_ages():
    shown = render(report(device("cpu-node0")), now_s=None)
    assert "  NAME       HEALTH   MESSAGE\n● cpu-node0  Healthy\n" in shown
    assert "ago" not in render(BUSY, now_s=None)


def test_every_severity_has_a_sign_and_a_word_of_its_own_colours_aside():
    shown = [LOOKS[s] for s in Severity if s is not Severity.INFO]
    assert set(LOOKS) == set(Severity)
    for field in ("sign", "ascii", "word", "colour"):
        assert len({getattr(look, field) for look in shown}) == len(shown)


def test_the_worst_comes_first_in_the_headline():
    assert render(BUSY).startswith("worker-7  5 devices: 1 unhealthy, 1 unknown, 1 degraded, 2 healthy\n")


def test_the_worst_comes_first_in_the_table_only_where_asked_for():
    names = [
        re.findall(r"^[●▲✖◌] (\S+)", render_report(BUSY, PLAIN, worst_first=w), re.M) for w in (False, True)
    ]
    assert names[0] == [device.device for device in BUSY.devices]
    assert names[1] == [names[0][n] for n in (3, 2, 1, 0, 4)]


def test_no_device_at_all_is_said():
    assert render(report()).startswith("worker-7  no devices\n")


def test_all_causes_are_shown_and_the_same_advice_once():
    again = THROTTLED.__class__(
        "cpu.throttled.package", Severity.DEGRADED, THROTTLED.blame, "7 events", THROTTLED.advice, instant(3)
    )
    shown = render(report(device("cpu-node0", THROTTLED, again)))
    assert "cpu.throttled.core: 10 events or more in 60 s" in shown
    assert "cpu.throttled.package: 7 events" in shown
    assert shown.count(THROTTLED.advice) == 1


def test_a_device_without_known_causes_shows_its_message():
    one = device("gpu-0", severity=Severity.UNHEALTHY, message="fell off the bus")
    assert "fell off the bus" in render(report(one))


def test_an_info_cause_leaves_a_device_healthy_but_is_shown():
    shown = render(report(device("hugepages-2mi-node0", HIT)))
    assert re.search(
        r"● hugepages-2mi-node0 +Healthy.*· cgroup.hugetlb.max_hit: 2MB limit of 64 MiB hit", shown
    )


def test_the_pool_is_named_only_where_it_is_not_the_nodes_own():
    mixed = report(device("gpu-0"), device("gpu-0", pool="other"))
    assert re.findall(r"● (\S+)", render(mixed)) == ["gpu-0", "other/gpu-0"]
    from_a_driver = report(device("gpu-0", pool="p"), device("gpu-1", pool="p"), node="")
    assert render(from_a_driver).startswith("p  2 devices")
    assert re.findall(r"● (\S+)", render(from_a_driver)) == ["gpu-0", "gpu-1"]


def test_declared_devices_stand_below_their_driver_under_their_own_names():
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


def test_declared_devices_that_are_not_below_their_driver_carry_its_name():
    sick = device("set-0", THROTTLED, owner="cpu.example.com")
    shown = render_report(report(device("cpu-node0"), sick), PLAIN, worst_first=True)
    assert re.findall(r"^[●▲✖◌] (\S+)", shown, re.MULTILINE) == ["cpu.example.com/set-0", "cpu-node0"]


def test_a_gpu_that_its_driver_declares_is_counted_once_and_what_to_do_about_it_is_said_once():
    declared = device("h100-0", LOST, owner="gpu.example.com", product="NVIDIA A100-SXM4-40GB")
    shown = render(report(gpu(0, LOST), declared))
    assert "gpus  1 x NVIDIA A100-SXM4-40GB" in shown
    assert shown.count("gpu.lost: NVML answers 15, the GPU is lost\n") == 2
    assert shown.count("→ reboot the node\n") == 1


def test_the_same_check_with_other_evidence_says_again_what_to_do():
    less = replace(SHRUNK, evidence="3 pages, 4 at start")
    shown = render(report(device("hugepages-2mi-node0", SHRUNK), device("hugepages-2mi-node1", less)))
    assert shown.count(SHRUNK.advice) == 2


def test_rules_of_other_devices_are_other_lines():
    rules = [NotApplicable("gpu-0", "gpu.a", "needs 1 min"), NotApplicable("node", "node.b", "needs 1 min")]
    shown = render(report(not_evaluated=tuple(rules)))
    assert "needs 1 min: gpu.a on gpu-0\n" in shown
    assert "needs 1 min: node.b on node\n" in shown


def test_rules_of_declared_devices_name_the_pool_only_where_it_is_not_the_nodes_own():
    rules = [NotApplicable(f"cpu.example.com/{pool}/set-0", "cpu.numa", "none") for pool in ("worker-7", "p")]
    shown = render(report(not_applicable=tuple(rules)))
    assert "none: cpu.numa on cpu.example.com/set-0, cpu.example.com/p/set-0\n" in shown


def test_rules_that_do_not_apply_are_collapsed_by_their_reason():
    rules = [NotApplicable(f"cpu-node{n}", code, "no counters") for n in range(4) for code in ("a.b", "a.c")]
    assert "no counters: a.b, a.c on 4 devices\n" in render(report(not_applicable=tuple(rules)))
    assert "no counters: a.b on cpu-node0, cpu-node1\n" in render(report(not_applicable=(rules[0], rules[2])))
    silent = tuple(NotApplicable("gpu-1", f"gpu.{n}", "gpu-1 does not answer") for n in range(30))
    assert "gpu-1 does not answer: 30 rules on gpu-1\n" in render(report(not_evaluated=silent))


def test_sources_that_are_well_share_a_line_and_the_others_say_why():
    shown = render(BUSY)
    assert "  sources         cpus, throttle: ok\n" in shown
    assert (
        "hugepages: failing, last read 3s ago, 3 failures, hugepages-1048576kB/nr_hugepages: Input" in shown
    )
    assert "cgroups: absent, no kubepods below /sys/fs/cgroup" in shown
    assert "2 beyond cgroups.max-groups are not" in shown


def test_a_stalled_source_says_since_when():
    stalled = report(device("cpu-node0"), sources=(source("cpus", SourceState.STALLED),))
    assert "cpus: stalled, last read 3s ago\n" in render(stalled)


def test_notes_are_listed_with_their_age():
    assert "container 9b1d: cgroup.hugetlb.max_hit: 2MB limit of 64 MiB hit (3m ago)\n" in render(BUSY)


def test_notes_stand_worst_first_with_their_severity_and_what_to_do():
    notes = (Note("pod 1", HIT), Note("node", HUNG), Note("pod 2", STOLEN), Note("pod 3", STOLEN))
    assert render(report(notes=notes)).partition("  NOTES\n")[2] == (
        "▲ node.hung_task: blocked for minutes: dd (60s ago)\n"
        "  → reboot the node\n"
        "▲ pod 2: cgroup.cpu.throttled_exclusive: throttled (12s ago)\n"
        "▲ pod 3: cgroup.cpu.throttled_exclusive: throttled (12s ago)\n"
        "  → take the quota off\n"
        "· pod 1: cgroup.hugetlb.max_hit: 2MB limit of 64 MiB hit (3m ago)\n"
    )


def test_a_note_names_the_devices_that_its_pod_uses():
    stolen = Note("pod 1", STOLEN, ("cpu.example.com/worker-7/set-0", "cpu.example.com/p/set-0"))
    shown = render(report(notes=(stolen,)), now_s=None)
    assert "throttled (uses cpu.example.com/set-0, cpu.example.com/p/set-0)\n" in shown


def test_the_id_of_a_container_is_as_short_as_crictl_takes_it():
    stolen = device("cpuset-0", cause("a.b", Severity.DEGRADED, f"pod 1 container {'9b1d' * 16}: throttled"))
    shown = render(report(stolen, notes=(Note(f"pod 1 container {'9b1d' * 16}", HIT),)))
    assert "a.b: pod 1 container 9b1d9b1d9b1d9: throttled\n" in shown
    assert "· pod 1 container 9b1d9b1d9b1d9: cgroup.hugetlb.max_hit: " in shown
    assert render(report(device("gpu-0", message="f" * 65))).endswith("f" * 65 + "\n"), "that is no id"


def test_gpus_with_their_instances_say_what_is_wrong_once_and_which_gpu_to_pull():
    assert render(GPUS, now_s=None) == (
        "worker-7  21 devices: 9 unhealthy, 12 healthy\n"
        "\n"
        "  NAME           HEALTH     MESSAGE\n"
        "● gpu-0          Healthy    and its 7 instances\n"
        "✖ gpu-1          Unhealthy  gpu.lost: NVML answers 15, the GPU is lost\n"
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


def test_an_instance_that_has_more_wrong_than_its_gpu_is_shown():
    shown = render(report(gpu(0, LOST), instance(1, 0, LOST, CONTAINED), instance(2, 0, LOST)))
    assert re.findall(r"✖ (\S+)", shown) == ["gpu-0", "gpu-0-mig-1-0"]
    assert "and 1 of its 2 instances\n" in shown


def test_an_instance_that_is_better_or_worse_than_its_gpu_is_shown():
    worse = render(report(gpu(0), instance(1, 0, UNREADABLE)))
    better = render(report(gpu(0, LOST), instance(1, 0)))
    assert "gpu-0-mig-1-0  Unknown" in worse
    assert "gpu-0-mig-1-0  Healthy" in better


def test_an_instance_whose_gpu_is_in_another_pool_or_not_there_is_shown():
    other = device("gpu-0", pool="other")
    assert "gpu-0-mig-1-0" in render(report(other, instance(1, 0)))
    assert "gpu-0-mig-1-0" in render(report(instance(1, 0)))


def test_on_a_drivers_socket_instances_are_told_by_their_message():
    one = {"severity": Severity.UNHEALTHY, "message": "gpu.lost: it is lost"}
    shown = render(report(device("gpu-0", **one), device("gpu-0-mig-1-0", **one), node=""))
    assert "gpu.lost: it is lost\n" in shown
    assert "and its instance\n" in shown
    assert "gpu-0-mig" not in shown


def test_sixteen_sources_that_are_the_same_are_one_line_and_the_odd_one_another():
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
def test_only_names_that_count_on_are_a_range(names, text):
    assert fold_names(names) == text


def test_a_node_without_gpus_is_not_told_at_length_that_it_has_none():
    absent = [
        source(name, SourceState.ABSENT, 0, "no such library", vital=False)
        for name in ("nvml", "nvml-events")
    ]
    shown = render(report(device("cpu-node0"), sources=(source("cpus"), *absent)))
    assert "           nvml, nvml-events: absent\n" in shown
    assert "no such library" not in shown
    assert "nvml absent (no such library)" in render(report(sources=tuple(absent)))


def test_a_library_that_was_named_by_its_path_is_missed():
    nvml = source("nvml", SourceState.ABSENT, 0, "/opt/libnvidia-ml.so.1: cannot open", vital=False)
    shown = render(report(device("cpu-node0"), sources=(source("cpus"), nvml)))
    assert "nvml: absent, /opt/libnvidia-ml.so.1: cannot open\n" in shown


def test_where_no_device_events_arrive_the_reason_is_said():
    deaf = source("uevents", SourceState.ABSENT, 0, "none in this network namespace", vital=False)
    shown = render(report(device("cpu-node0"), sources=(source("cpus"), deaf)))
    assert "uevents: absent, none in this network namespace\n" in shown


def test_what_to_do_about_what_several_devices_share_is_said_once():
    shown = render(report(gpu(0, LOST), gpu(1, LOST), gpu(2), gpu(3, LOST)))
    assert shown.count("gpu.lost: NVML answers 15, the GPU is lost\n") == 3
    assert shown.count("→ reboot the node\n") == 1
    assert shown.index("→ reboot the node") < shown.index("GPU-00000000") < shown.index("gpu-1")


def test_what_is_not_judged_stands_last():
    titles = re.findall(r"^  (\w[\w ]*?)  +\S", render(BUSY).partition("NOTES")[2], re.MULTILINE)
    assert titles == ["sources", "cgroups", "not evaluated", "not applicable"]


@pytest.mark.parametrize("width", range(40, 200, 7))
def test_no_line_of_the_table_is_wider_than_the_terminal(width):
    lines = render(BUSY, Style(width=width)).splitlines()[1:]
    assert max(len(line) for line in lines if line.startswith((" ", "●"))) <= max(width, 56)


def test_without_a_terminal_nothing_is_wrapped():
    text = " ".join(["word"] * 200)
    one = device("gpu-0", severity=Severity.UNHEALTHY, message=text)
    assert text in render(report(one))


def test_a_narrow_terminal_has_the_message_below_its_device():
    shown = render(report(device("hugepages-1gi-node0", UNREADABLE)), Style(width=70))
    assert "MESSAGE" not in shown
    assert "\n    mem.hugepages.pool_shrunk.unreadable: nr_hugepages:" in shown


@pytest.mark.parametrize("shown", [BUSY, GPUS])
@pytest.mark.parametrize("width", [None, 60, 120])
def test_colours_change_nothing_but_the_colours(shown, width):
    plain, painted = (render(shown, Style(width=width, colour=colour)) for colour in (False, True))
    assert "\x1b[31mUnhealthy\x1b[0m" in painted
    assert ESCAPE.sub("", painted) == plain


def test_a_line_closes_the_colours_that_it_opens():
    for line in render(BUSY, Style(width=60, colour=True)).splitlines():
        codes = ESCAPE.findall(line)
        assert codes[1::2] == ["\x1b[0m"] * (len(codes) // 2)
        assert len(codes) % 2 == 0


def test_a_terminal_without_unicode_gets_ascii_signs():
    assert (render(BUSY, Style(unicode=False)) + render(GPUS, Style(unicode=False))).isascii()


@given(st.text(max_size=80), st.integers(20, 120))
def test_no_text_from_outside_can_steer_the_terminal_or_add_lines(text, width):
    one = device(text, severity=Severity.UNHEALTHY, message=text, pool=text, uuid=text, product=text)
    shown = render(report(one, node=text), Style())
    assert all(line.isprintable() for line in shown.split("\n"))
    assert render(report(one, node=text), Style(width=width)).replace("\n", "").isprintable()


def test_clean_text_is_left_alone():
    assert clean("pages: 500 → 512 …") == "pages: 500 → 512 …"
    assert clean("a\x1b[31mb\nc\u202e") == "a\ufffd[31mb\ufffdc\ufffd"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0.9, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172_800, "2d")],
)
def test_ages_are_short_and_never_negative(seconds, text):
    assert format_age(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (35 << 20, "35.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_sizes_have_a_binary_unit(size, text):
    assert format_bytes(size) == text


def test_counts_agree_with_their_noun():
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
    tallies=(Tally(Severity.UNHEALTHY, 1), Tally(Severity.OK, 2)),
    sources=(source("cpus"),),
    core=CoreStats(
        passes=1000, wakes=3, reads=24_000, opens=31, descriptors=29, watches=1, kernel_bytes=49152
    ),
    groups=14,
    subscribers=(Subscribers("agent.sock", 1), Subscribers("drivers/gpu.example.com.sock", 2)),
)


def test_the_status_says_what_the_agent_costs_and_whom_it_serves():
    assert render_status(STATUS, PLAIN, now_s=NOW_S) == (
        "worker-7  3 devices: 1 unhealthy, 2 healthy\n"
        "\n"
        "  agent        drahealth 0.1.0, pid 42, up 16m\n"
        "  costs        1.50 s CPU (0.15 % of a core), 33.0 MiB, 4 threads, 31 descriptors\n"
        "  core         1,000 passes, 3 wake-ups, 24,000 reads, 31 opens, 29 descriptors, 1 watch, "
        "48.0 KiB in the kernel\n"
        "  reports      12 published, the last 4s ago\n"
        "  subscribers  agent.sock: 1 stream\n"
        "               drivers/gpu.example.com.sock: 2 streams\n"
        "  sources      cpus: ok\n"
        "  cgroups      14 watched\n"
    )


def test_an_agent_that_has_just_started_has_no_report_yet():
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
def test_colour_is_for_terminals_unless_asked_for(choice, environ, is_terminal, expected):
    assert takes_colour(choice, environ, is_terminal=is_terminal) is expected

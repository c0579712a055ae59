"""Patterns for the host: which lines the native reader matches, and which it counts together."""

from typing import Final

import pytest
from agent.native._core import lib
from hypothesis import given
from hypothesis import strategies as st
from log_lines import AMD, CASES, EDAC, LAYER, MCE, OOM, POD, SILENT, match_pattern

from agent.health.gpu.xid.log_lines import GPU_LOG_PATTERNS
from agent.health.kernel_log.facts import (
    HOST_PATTERNS,
    HOST_PATTERNS_BY_CODE,
    KernelLogCode,
    LazyLinePattern,
    compile_pattern,
)
from agent.health.kernel_log.parse import HostLogLine, parse_host_line

CODES: Final = [code for code, patterns in HOST_PATTERNS_BY_CODE.items() for _ in patterns]


def kind_of(text: str) -> tuple[int, tuple[str, ...]] | None:
    """Return what the native reader makes of a line: the first matching pattern and the key."""
    keys = ((index, match_pattern(pattern, text)) for index, pattern in enumerate(HOST_PATTERNS))
    return next(((index, key) for index, key in keys if key is not None), None)


@pytest.mark.parametrize(("text", "line"), CASES, ids=range(len(CASES)))
def test_native_reader_matches_every_line(text: str, line: HostLogLine) -> None:
    kind = kind_of(text)
    assert kind is not None
    assert CODES[kind[0]] is line.code


def test_every_pattern_matches_a_line() -> None:
    assert {kind[0] for text, _ in CASES if (kind := kind_of(text))} == set(range(len(HOST_PATTERNS)))


def test_pattern_table_is_complete_and_fits_the_reader() -> None:
    assert set(HOST_PATTERNS_BY_CODE) == set(KernelLogCode)
    assert (
        len({*GPU_LOG_PATTERNS, *HOST_PATTERNS})
        == len(GPU_LOG_PATTERNS) + len(HOST_PATTERNS)
        <= lib.DH_PATTERN_MAX
    )


@pytest.mark.parametrize("text", [text for text, _ in CASES])
def test_host_lines_match_no_gpu_pattern(text: str) -> None:
    assert [pattern for pattern in GPU_LOG_PATTERNS if match_pattern(pattern, text) is not None] == []


def oom(cgroup: str, task: str) -> str:
    rest = f"oom_memcg={cgroup},task_memcg={cgroup}/{task},task={task},pid=1,uid=0"
    return f"{OOM}CONSTRAINT_MEMCG,nodemask=(null),cpuset={task},mems_allowed=0,{rest}"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MCE + "8c00004000010091", MCE + "cc00010000010092"),
        (MCE + "be00000000800400", MCE.replace("Bank 5", "Bank 7") + "ba00000000010092"),
        ("{1}[Hardware Error]: event severity: corrected", "{2}[Hardware Error]: event severity: corrected"),
        ("watchdog: BUG: soft lockup - CPU#7 stuck for 26s! [a:1]",
         "watchdog: BUG: soft lockup - CPU#7 stuck for 49s! [b:2]"),
        ("INFO: task python3:1 blocked for more than 122 seconds.",
         "INFO: task jbd2/sda1-8:7 blocked for more than 245 seconds."),
        (oom(POD, "a"), oom(POD, "b")),
        ("Memory failure: 0x1: recovery action for dirty LRU page: Recovered",
         "Memory failure: 0x2: recovery action for clean LRU page: Recovered"),
        (EDAC + " (channel:1 page:0x1)", EDAC.replace("1 CE", "9 CE") + " (channel:1 page:0x2)"),
        (f"nvme 0000:3b:00.0: PCIe Bus Error: severity=Corrected, {LAYER}",
         "pci 0000:3b:00.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)"),
        ("nvme nvme0: I/O 12 QID 3 timeout, aborting", "nvme nvme0: I/O 13 QID 4 timeout, reset controller"),
    ],
)  # fmt: skip
def test_flood_of_one_fault_is_one_entry(first: str, second: str) -> None:
    assert kind_of(first) == kind_of(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MCE + "8c00004000010091", MCE.replace("CPU 3", "CPU 4") + "8c00004000010091"),
        (MCE + "8c00004000010091", MCE + "be00000000800400"),
        (AMD + "-|UE|-]: 0xbea0000000000108", AMD + "-|CE|-]: 0x9ea0000000000108"),
        ("{1}[Hardware Error]: event severity: corrected", "{1}[Hardware Error]: event severity: fatal"),
        ("watchdog: BUG: soft lockup - CPU#7 stuck for 26s! [a:1]",
         "watchdog: BUG: soft lockup - CPU#8 stuck for 26s! [a:1]"),
        (oom(POD, "a"), oom(POD + "/b", "a")),
        (EDAC + " (channel:1 page:0x1)", EDAC.replace("MC0", "MC1") + " (channel:1 page:0x1)"),
        (EDAC + " (channel:1 page:0x1)", EDAC.replace("DIMM#0", "DIMM#1") + " (channel:1 page:0x1)"),
        (EDAC + " (channel:1 page:0x1)", EDAC.replace("CE", "UE") + " (channel:1 page:0x1)"),
        (f"nvme 0000:3b:00.0: PCIe Bus Error: severity=Corrected, {LAYER}",
         f"nvme 0000:3c:00.0: PCIe Bus Error: severity=Corrected, {LAYER}"),
        ("nvme nvme0: I/O 12 QID 3 timeout, aborting", "nvme nvme1: I/O 12 QID 3 timeout, aborting"),
    ],
)  # fmt: skip
def test_lines_with_different_keys_are_separate_entries(first: str, second: str) -> None:
    assert kind_of(first) != kind_of(second)


def test_oom_kill_key_fits_a_pods_cgroup() -> None:
    pod = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
    pod += "kubelet-kubepods-burstable-pod0f3c1a2b_4d5e_6f70_8192_a3b4c5d6e7f8.slice"
    container = f"{pod}/cri-containerd-{'9b' * 32}.scope"
    assert kind_of(oom(container, "a")) == (
        HOST_PATTERNS.index("oom-kill:constraint=%*,oom_memcg=%w,%*"),
        (container,),
    )
    assert len(container) < lib.DH_LOG_KEY


TEXTS: Final = st.builds(
    lambda text, cut, tail: text[:cut] + tail,
    st.sampled_from([text for text, _ in CASES] + SILENT),
    st.integers(0, 200),
    st.text(alphabet="0123456789abcdefx:.,()[]|={} CPUEnodeBank#-", max_size=40),
)


@given(TEXTS)
def test_expressions_match_the_native_reader(text: str) -> None:
    """The interpreter in C and the regular expression agree on every line and its key."""
    for pattern in HOST_PATTERNS:
        found = compile_pattern(pattern).match(text)
        kinds = [part[0] for part in pattern.split("%")[1:]]
        fields = found and tuple(f for f, kind in zip(found.groups(), kinds, strict=True) if kind != "*")
        assert match_pattern(pattern, text) == fields
        late = LazyLinePattern(pattern).match(text)
        assert (late and late.groups()) == (found and found.groups())


@given(TEXTS)
def test_first_matching_pattern_gives_the_code(text: str) -> None:
    kind, line = kind_of(text), parse_host_line(text)
    assert line is None or (kind is not None and CODES[kind[0]] is line.code)

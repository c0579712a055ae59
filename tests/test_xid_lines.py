"""Kernel log lines: every form that drivers write, and arbitrary texts."""

from typing import Final

import pytest
from agent.native._core import lib
from hypothesis import given
from hypothesis import strategies as st
from log_lines import match_pattern

from agent.health.gpu.xid.log_lines import (
    GPU_LOG_PATTERNS,
    GpuLostLine,
    InitFailedLine,
    LinkSetupFailedLine,
    Nvlink4Registers,
    Nvlink5Status,
    ParsedLine,
    SxidLine,
    UnparsedLine,
    VersionMismatchLine,
    XidLine,
    XidLocation,
    normal_pci_address,
    parse_line,
)
from agent.health.gpu.xid.xid_table import RecoveryAction
from agent.health.kernel_log.facts import compile_pattern

BUS: Final = "0000:3b:00.0"
XID: Final = "NVRM: Xid (PCI:0000:3b:00): "
DOWN: Final = "NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x00000000 0x00000000)"
PIPE: Final = "RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001 0x00000000)"
NETIR: Final = "NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000 0x00000000)"
LINK: Final = "NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)"
WARP: Final = "Graphics SM Warp Exception on (GPC 7, TPC 2, SM 0): Illegal Instruction Parameter"
ESR: Final = "Graphics Exception: ESR 0x57c730=0xc04000b 0x57c734=0x24 0x57c728=0x1f81fb60 0x57c72c=0x1174"
TO_RESET: Final = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
TO_NONE: Final = "GPU recovery action changed from 0x4 (Drain and Reset) to 0x0 (None)"
TO_NEWER: Final = "GPU recovery action changed from 0x0 (None) to 0x1f (Something New)"
MMU: Final = "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7fc1_23456000"
ECHO: Final = "Ch 00000001 caused by previous Xid 149"
GONE: Final = "GPU has fallen off the bus."
LOST: Final = "NVRM: The NVIDIA GPU 0000:3b:00.0{0}NVRM: (PCI ID: 10de:26b5) installed in this system has{0}\
NVRM: fallen off the bus and is not responding to commands."
MISMATCH: Final = "NVRM: API mismatch: the client has the version 535.247.01, but\\x0a\
NVRM: this kernel module has the version 535.230.02.  Please\\x0aNVRM: make sure that"
NAMED_MISMATCH: Final = (
    "NVRM: API mismatch: the client 'nvidia-smi' (pid 7)\\x0aNVRM: has the version 595.84, \
but\\x0aNVRM: this kernel module has the version 595.71.05.  Please"
)
MISMATCH_570: Final = (
    "NVRM: API mismatch: the client 'nvidia-smi' (pid 1234)\\x0aNVRM: has the version 580.95.05, "
    "but this kernel module has\\x0aNVRM: the version 580.82.07.  Please make sure that this"
)
SX: Final = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): "
RX: Final = "knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's postRxDetLinkMask failed!"
MASK: Final = "knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!"

CASES: Final[list[tuple[str, ParsedLine]]] = [
    # --- an XID, with and without the process
    (XID + "79, " + GONE, XidLine(BUS, 79)),
    (XID + "79, pid='<unknown>', name=<unknown>, " + GONE, XidLine(BUS, 79)),
    (XID + "79, pid=<n/a>, name=<unknown>, " + GONE, XidLine(BUS, 79)),
    (XID + "31, pid=1234, name=python3, " + MMU, XidLine(BUS, 31, pid=1234)),
    (XID + "31, pid=1234, " + MMU, XidLine(BUS, 31, pid=1234)),
    (XID + "43, pid=1234, name=python3", XidLine(BUS, 43, pid=1234)),
    (XID + "43, pid=1234", XidLine(BUS, 43, pid=1234)),
    (XID + "43, pid=7, name=tokio: w 1, Ch 1", XidLine(BUS, 43, pid=7)),
    (XID + "48, ", XidLine(BUS, 48)),
    ("NVRM: Xid (0000:03:00): 14, Channel 00000001", XidLine("0000:03:00.0", 14)),
    ("NVRM: Xid (PCI:00000018:01:00): 8, x", XidLine("0018:01:00.0", 8)),
    ("NVRM: Xid (PCI:10000:E1:00): 8, x", XidLine("10000:e1:00.0", 8)),
    (XID + "999, of a driver to come", XidLine(BUS, 999)),
    # --- of a MIG instance
    ("NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 48, x", XidLine(BUS, 48, gi=5)),
    ("NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:00): 43, pid=7, name=a, x",
     XidLine(BUS, 43, gi=5, ci=0, pid=7)),
    # --- what decides some of them
    (XID + "45, pid=7, name=a, " + ECHO, XidLine(BUS, 45, pid=7, root=149)),
    (XID + "13, pid=7, name=a, " + WARP,
     XidLine(BUS, 13, pid=7, location=XidLocation(7, 2))),
    (XID + "13, pid=7, name=a, " + ESR, XidLine(BUS, 13, pid=7)),
    (XID + "154, " + TO_RESET, XidLine(BUS, 154, action=RecoveryAction.GPU_RESET)),
    (XID + "154, " + TO_NONE, XidLine(BUS, 154, action=RecoveryAction.NONE)),
    (XID + "154, " + TO_NEWER, XidLine(BUS, 154, action=RecoveryAction(31))),
    (XID + "154, in other words", XidLine(BUS, 154)),
    (XID + "74, pid='<unknown>', name=<unknown>, " + LINK,
     XidLine(BUS, 74, nvlink4=Nvlink4Registers(14, (0, 0, 0x10000, 0, 0, 0, 0)))),
    (XID + "74, NVLink: fatal error detected on link 2",
     XidLine(BUS, 74)),
    (XID + "149, " + DOWN,
     XidLine(BUS, 149, nvlink5=Nvlink5Status("NETIR_LINK_EVT", True, 1, 0x021425C6, 0))),
    (XID + "149, " + NETIR,
     XidLine(BUS, 149, nvlink5=Nvlink5Status("NETIR", True, -1, 0x000FE406, 0))),
    (XID + "145, pid=7, name=a, " + PIPE,
     XidLine(BUS, 145, pid=7,
             nvlink5=Nvlink5Status("RLW_RXPIPE", False, 13, 0x0409A0C2, 8))),
    (XID + "146, TLW_RX/TLW_RX_PIPE0 Odd XC0 i0 Link 00 (0xa 0x4)",
     XidLine(BUS, 146,
             nvlink5=Nvlink5Status("TLW_RX/TLW_RX_PIPE0", None, 0, 0xA, 4))),
    (XID + "145, without words", XidLine(BUS, 145)),
    (XID + "31, " + DOWN, XidLine(BUS, 31)),
    # --- NVSwitches
    (SX + "28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)",
     SxidLine(3, "0000:c1:00.0", 28006, False, 46, "Link 46 MC TS crumbstore MCTO (First)")),
    (SX + "20034, Fatal, Link 30 LTSSM Fault Up",
     SxidLine(3, "0000:c1:00.0", 20034, True, 30, "Link 30 LTSSM Fault Up")),
    (SX + "11001, Fatal, ingress invalid command",
     SxidLine(3, "0000:c1:00.0", 11001, True, None, "ingress invalid command")),
    (SX + "12021, Correctable, Link 07 ECC", SxidLine(3, "0000:c1:00.0", 12021, False, 7, "Link 07 ECC")),
    (SX + "26006, SOE HALTED", SxidLine(3, "0000:c1:00.0", 26006, None, None, "SOE HALTED")),
    (SX + "10004, PMGR OVERT Threshold reached. Shutting Down",
     SxidLine(3, "0000:c1:00.0", 10006, None, None, "PMGR OVERT Threshold reached. Shutting Down")),
    (SX + "22013, Severity 0 Engine instance 60 Sub-engine instance 00",
     SxidLine(3, "0000:c1:00.0", 22013, False, None,
              "Severity 0 Engine instance 60 Sub-engine instance 00", is_companion=True)),
    (SX + "22013, Data {0x00000000, 0x00000000}",
     SxidLine(3, "0000:c1:00.0", 22013, None, None, "Data {0x00000000, 0x00000000}", is_companion=True)),
    # --- lost, without an XID
    (LOST.format("\\x0a"), GpuLostLine(BUS)),
    (LOST.format("\n"), GpuLostLine(BUS)),
    ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", GpuLostLine(BUS)),
    ("NVRM: GPU at PCI:0000:3b:00: GPU has fallen off the bus.", GpuLostLine(BUS)),
    ("NVRM: GPU at PCI:0000:3b:00 has fallen off the bus.", GpuLostLine(BUS)),
    ("NVRM: GPU at 0000:3b:00.0 has fallen off the bus.", GpuLostLine(BUS)),
    # --- the driver
    ("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0xffff:1863)",
     InitFailedLine(BUS)),
    ("NVRM: RmInitAdapter failed! (0x27:0x38:1193)", InitFailedLine("")),
    ("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed!", InitFailedLine(BUS)),
    (MISMATCH, VersionMismatchLine()),
    (NAMED_MISMATCH, VersionMismatchLine()),
    (MISMATCH_570, VersionMismatchLine()),
    (f"NVRM: {RX}", LinkSetupFailedLine()),
    (f"NVRM: {MASK}", LinkSetupFailedLine()),
    (f"NVRM: GPU0 {RX}", LinkSetupFailedLine()),
]  # fmt: skip

SILENT: Final = [
    "",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15",
    "NVRM: GPU at PCI:0000:3b:00: GPU-b850f46d-d5ea-c752-ddf3-c4453e44d3f7",
    "NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:2c05)\\x0aNVRM: requires the open modules",
    "NVRM: Xid error: xyz, invalid data",
    "NVRM: Xid (PCI:0000:66:00): abc, pid=2280636",
    "NVRM: Xid (PCI:0000:3b:00): 79",
    "NVRM: Xid (PCI:0000:3b:00): 12345678901, more digits than any code has",
    "NVRM: Xid (PCI:0000:3b:00 GPU-I:12345678901): 79, x",
    "[111.111] NVRM: Xid (PCI:0000:3b:00): 79, not at the start",
    "python[7]: NVRM: Xid (PCI:0000:3b:00): 79, not at the start",
    SX + "garbled, Fatal",
    "nvidia-nvswitch12345678901: SXid (PCI:0000:c1:00.0): 22013, Fatal, x",
    "NVRM: API mismatch: cut",
    "NVRM: knvlinkDiscoverPostRxDetLinks_GH100: all is well",
]


@pytest.mark.parametrize(("text", "line"), CASES, ids=range(len(CASES)))
def test_line_is_parsed_as_expected(text: str, line: ParsedLine) -> None:
    found = parse_line(text)
    assert (type(found), found) == (type(line), line)


@pytest.mark.parametrize("text", SILENT)
def test_unknown_line_is_unparsed(text: str) -> None:
    assert isinstance(parse_line(text), UnparsedLine)


def kind_of(text: str) -> tuple[int, tuple[str, ...]] | None:
    """Return the key of a line in the native reader: the first pattern that matches, and its values."""
    keys = ((index, match_pattern(pattern, text)) for index, pattern in enumerate(GPU_LOG_PATTERNS))
    return next(((index, key) for index, key in keys if key is not None), None)


@pytest.mark.parametrize(("text", "_"), CASES, ids=range(len(CASES)))
def test_reader_matches_every_parsed_line(text: str, _: ParsedLine) -> None:
    assert kind_of(text) is not None


def test_pattern_table_fits_reader_limits() -> None:
    assert len(GPU_LOG_PATTERNS) <= lib.DH_PATTERN_MAX
    assert len(set(GPU_LOG_PATTERNS)) == len(GPU_LOG_PATTERNS)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (XID + "31, pid=1, name=a, Ch 1", XID + "31, pid=2, name=b, Ch 2"),
        (XID + "13, pid=1, name=a, " + WARP, XID + "13, pid=2, name=b, " + WARP.replace("TPC 2", "TPC 3")),
        (XID + "45, pid=1, name=a, " + ECHO, XID + "45, pid=2, name=a, Ch 2"),
        (XID + "149, " + DOWN, XID + "149, " + DOWN.replace("0x00000000)", "0x00000007)")),
        (SX + "20034, Fatal, Link 30 LTSSM Fault Up", SX + "20034, Fatal, Link 31 LTSSM Fault Up"),
        (MISMATCH, NAMED_MISMATCH),
    ],
)
def test_repeated_lines_of_one_fault_are_one_entry(first: str, second: str) -> None:
    assert kind_of(first) == kind_of(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (XID + "31, x", XID + "32, x"),
        (XID + "48, x", "NVRM: Xid (PCI:0000:3c:00): 48, x"),
        (XID + "48, x", "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 48, x"),
        (XID + "13, " + WARP, XID + "13, " + ESR),
        (XID + "13, " + WARP, XID + "13, " + WARP.replace("GPC 7", "GPC 3")),
        (XID + "154, " + TO_RESET, XID + "154, " + TO_NONE),
        (XID + "74, " + LINK, XID + "74, " + LINK.replace("link 14", "link 15")),
        (XID + "74, " + LINK, XID + "74, " + LINK.replace("0x10000", "0x20000")),
        (XID + "145, " + PIPE, XID + "145, " + PIPE.replace("0x00000008", "0x00000004")),
        (XID + "149, " + DOWN, XID + "149, " + DOWN.replace("0x0214", "0x0264")),
        (SX + "20034, Fatal, x", SX + "20034, Non-fatal, x"),
    ],
)
def test_lines_with_different_deciding_values_are_separate(first: str, second: str) -> None:
    assert kind_of(first) != kind_of(second)


TEXTS: Final = st.text(max_size=200) | st.builds(
    lambda case, cut, tail: case[:cut] + tail,
    st.sampled_from([text for text, _ in CASES]),
    st.integers(0, 120),
    st.text(alphabet="0123456789abcdefx:.,() GPUXid%\\", max_size=30),
)


@given(TEXTS)
def test_any_line_is_parsed_without_exception(text: str) -> None:
    line = parse_line(text)
    if isinstance(line, XidLine):
        assert normal_pci_address(line.bus) == line.bus
        assert line.code >= 0


@given(TEXTS)
def test_regular_expressions_match_like_the_reader(text: str) -> None:
    """The interpreter in C and its Python counterpart agree on every line, and on its key."""
    text = text.encode("ascii", "backslashreplace").decode()
    for pattern in GPU_LOG_PATTERNS:
        found = compile_pattern(pattern).match(text)
        directives = [part for part in pattern.split("%")[1:] if part]
        fields = (
            tuple(field for field, part in zip(found.groups(), directives, strict=True) if part[0] != "*")
            if found
            else None
        )
        assert match_pattern(pattern, text) == fields


@pytest.mark.parametrize(
    ("text", "bus"),
    [
        ("0000:3b:00", BUS),
        ("0000:3B:00.0", BUS),
        ("00000000:3B:00.0", BUS),
        ("PCI:0000:3b:00", BUS),
        ("0000:3b:00.1", "0000:3b:00.1"),
        ("gpu-3", "gpu-3"),
        ("", ""),
        ("0000:3b", "0000:3b"),
    ],
)
def test_pci_address_is_normalized(text: str, bus: str) -> None:
    assert normal_pci_address(text) == bus


def test_unknown_recovery_action_is_not_none() -> None:
    action = RecoveryAction(31)
    assert action != RecoveryAction.NONE
    assert action.text == "action 31"
    assert "31" in action.advice
    assert RecoveryAction(31) == action
    with pytest.raises(ValueError, match="not a valid RecoveryAction"):
        RecoveryAction("reset")


def test_every_recovery_action_except_none_has_advice() -> None:
    assert [action for action in RecoveryAction if not action.advice] == [RecoveryAction.NONE]
    assert RecoveryAction.DRAIN_AND_RESET.text == "drain and reset"


def test_main_line_and_companions_of_sxid_are_separate_entries() -> None:
    details = (
        "Fatal, Link 46 egress sequence id error",
        "Non-fatal, Link 46 egress sequence id error",
        "Severity 1 Engine instance 46 Sub-engine instance 00",
        "Severity 0 Engine instance 46 Sub-engine instance 00",
        "Data {0x00000001, 0x00000000}",
        "without a severity",
    )
    assert len({kind_of(f"{SX}12020, {detail}") for detail in details}) == len(details)

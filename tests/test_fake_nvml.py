"""The fake NVML through pynvml: readings of healthy GPUs, and delivery of events."""

import re
import subprocess
from pathlib import Path

import pytest
from fake_nvml import BRANCHES, NATIVE, fake_nvml, library, play

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

HEADER = NATIVE / "src" / "gpu" / "nvml.h"
WHOLE_GPU = 0xFFFFFFFF


def test_healthy_h100_has_expected_readings(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path),
        """
        g = gpus[0]
        fabric = n.c_nvmlGpuFabricInfo_v3_t()
        n.nvmlDeviceGetGpuFabricInfoV(g, n.byref(fabric))
        sram = n.c_nvmlEccSramErrorStatus_v1_t()
        n.nvmlDeviceGetSramEccErrorStatus(g, n.byref(sram))
        pci = n.nvmlDeviceGetPciInfo_v3(g)
        util = n.nvmlDeviceGetUtilizationRates(g)
        answer = {
            "driver": [n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetNVMLVersion()],
            "name": n.nvmlDeviceGetName(g), "uuid": n.nvmlDeviceGetUUID(g),
            "serial": n.nvmlDeviceGetSerial(g), "minor": n.nvmlDeviceGetMinorNumber(g),
            "bus": [pci.busId, pci.busIdLegacy, pci.bus, pci.pciDeviceId],
            "brand": n.nvmlDeviceGetBrand(g), "arch": n.nvmlDeviceGetArchitecture(g),
            "vbios": n.nvmlDeviceGetVbiosVersion(g), "index": n.nvmlDeviceGetIndex(g),
            "persistence": n.nvmlDeviceGetPersistenceMode(g), "ecc": n.nvmlDeviceGetEccMode(g),
            "errors": [n.nvmlDeviceGetTotalEccErrors(g, 1, 0), n.nvmlDeviceGetMemoryErrorCounter(g, 1, 1, 2)],
            "sram": [sram.volatileUncSecDed, sram.bThresholdExceeded],
            "remap": n.nvmlDeviceGetRemappedRows(g),
            "temperature": [n.nvmlDeviceGetTemperature(g, 0), n.nvmlDeviceGetTemperatureV(g, 0),
                            n.nvmlDeviceGetMarginTemperature(g)],
            "limits": [n.nvmlDeviceGetTemperatureThreshold(g, t) for t in range(4)],
            "clocks": [n.nvmlDeviceGetCurrentClocksEventReasons(g), n.nvmlDeviceGetPerformanceState(g)],
            "power": [n.nvmlDeviceGetPowerUsage(g), n.nvmlDeviceGetEnforcedPowerLimit(g)],
            "load": [util.gpu, util.memory, len(n.nvmlDeviceGetComputeRunningProcesses(g))],
            "pcie": [n.nvmlDeviceGetCurrPcieLinkGeneration(g), n.nvmlDeviceGetMaxPcieLinkGeneration(g),
                     n.nvmlDeviceGetCurrPcieLinkWidth(g), n.nvmlDeviceGetMaxPcieLinkWidth(g),
                     n.nvmlDeviceGetPcieReplayCounter(g)],
            "links": [n.nvmlDeviceGetNvLinkState(g, 17), n.nvmlDeviceGetNvLinkErrorCounter(g, 17, 0),
                      refused(n.nvmlDeviceGetNvLinkState, g, 18)],
            "fabric": [fabric.state, fabric.status, fabric.healthMask, fabric.healthSummary],
            "mig": [n.nvmlDeviceGetMigMode(g), n.nvmlDeviceGetMaxMigDeviceCount(g)],
            "refused": [refused(n.nvmlDeviceGetRetiredPages_v2, g, 0), refused(n.nvmlDeviceGetNumaNodeId, g),
                        refused(n.nvmlDeviceGetRetiredPagesPendingStatus, g)],
            "same": [same(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(g)), g),
                     same(n.nvmlDeviceGetHandleByPciBusId(pci.busId), g)],
        }
        """,
    )
    assert answer == {
        "driver": ["580.95.05", "13.580.95.05"],
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": "GPU-fa4e0009-0000-4000-8000-000000000000",
        "serial": "1650009000000",
        "bus": ["00000000:1B:00.0", "0000:1B:00.0", 0x1B, 0x233010DE],
        "minor": 0,
        "brand": pynvml.NVML_BRAND_NVIDIA,
        "arch": pynvml.NVML_DEVICE_ARCH_HOPPER,
        "vbios": "96.00.89.00.01",
        "index": 0,
        "persistence": 1,
        "ecc": [1, 1],
        "errors": [0, 0],
        "sram": [0, 0],
        "remap": [0, 0, 0, 0],
        "temperature": [33, 33, 54],
        "limits": [95, 89, 95, 87],
        "clocks": [1, 0],
        "power": [71000, 700000],
        "load": [0, 0, 0],
        "pcie": [5, 5, 16, 16, 0],
        "links": [1, 0, pynvml.NVML_ERROR_INVALID_ARGUMENT],
        "fabric": [3, 0, 0x1AA, 1],
        "mig": [[0, 0], 0],
        "refused": [3, 3, 3],
        "same": [True, True],
    }


def test_t4_has_retired_pages_and_no_newer_fields(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "profile t4 gpus=2", "gpu 1 set retired.dbe=2 retired.pending=1"),
        """
        g = gpus[1]
        answer = [
            [page["address"] for page in n.nvmlDeviceGetRetiredPages_v2(g, 1)],
            n.nvmlDeviceGetRetiredPages(g, 0),
            n.nvmlDeviceGetRetiredPagesPendingStatus(g), fields(g, 29, 30, 31, 142, 165, 230),
            [refused(call, g) for call in (n.nvmlDeviceGetRemappedRows, n.nvmlDeviceGetMigMode)],
            refused(n.nvmlDeviceGetNvLinkState, g, 0), n.nvmlDeviceGetSupportedEventTypes(g),
        ]
        """,
    )
    assert answer == [
        [0x10000 * 1001, 0x10000 * 1002],
        [],
        1,
        [0, 2, 1, "error 3", "error 3", "error 3"],
        [3, 3],
        3,
        0x1F,
    ]


def test_buffer_too_small_is_refused_and_not_overrun(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "gpu 0 set processes=3"),
        """
        from ctypes import *
        text, count = create_string_buffer(b"x" * 40), c_uint(2)
        infos = (n.c_nvmlProcessInfo_t * 2)()
        answer = [n.nvmlLib.nvmlDeviceGetUUID(gpus[0], text, 40), text.value.decode(),
                  n.nvmlLib.nvmlDeviceGetUUID(gpus[0], text, 41), len(text.value),
                  n.nvmlLib.nvmlDeviceGetComputeRunningProcesses_v3(gpus[0], byref(count), infos),
                  count.value, infos[0].pid]
        """,
    )
    assert answer == [7, "x" * 40, 0, 40, 7, 3, 0]


def test_structure_of_unknown_version_is_refused(tmp_path: Path) -> None:
    code = """
        answer = []
        for name, structure in (("GpuFabricInfoV", n.c_nvmlGpuFabricInfo_v3_t()),
                                ("SramEccErrorStatus", n.c_nvmlEccSramErrorStatus_v1_t())):
            call = getattr(n.nvmlLib, "nvmlDeviceGet" + name)
            answer.append(call(gpus[0], n.byref(structure)))
            structure.version += 1
            answer.append(call(gpus[0], n.byref(structure)))
        """
    mismatch = pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    assert play(fake_nvml(tmp_path), code) == [0, mismatch, 0, mismatch]
    assert play(fake_nvml(tmp_path, branch=570), code) == [
        mismatch,
        mismatch,
        0,
        mismatch,
    ]  # 3: since 580


def test_calls_without_a_session_are_refused(tmp_path: Path) -> None:
    code = """
        answer = [refused(n.nvmlDeviceGetCount), refused(n.nvmlShutdown)]
        n.nvmlInit()
        n.nvmlInit()
        n.nvmlShutdown()
        answer.append(refused(n.nvmlDeviceGetCount))
        n.nvmlShutdown()
        answer.append(refused(n.nvmlDeviceGetCount))
        """
    assert play(fake_nvml(tmp_path), code, init=False) == [1, 1, 0, 1]


# --- field values --------------------------------------------------------------------------------------


def test_added_quantity_counts_in_its_lifetime_sum(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(
            tmp_path,
            *(f"gpu 0 set ecc.{m}.uncorrectable.volatile=+{n}" for m, n in (("dram", 2), ("sram", 1))),
        ),
        """
        answer = [fields(gpus[0], 4, 6, 12, 23)]
        send("gpu 0 reset")
        answer.append(fields(gpus[0], 4, 6, 12, 23))
        """,
    )
    assert answer == [[3, 3, 2, 2], [0, 3, 0, 2]]


def test_without_ecc_there_are_no_counters(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "gpu 0 set ecc.mode=0"),
        "answer = fields(gpus[0], 1, 4) + [refused(n.nvmlDeviceGetTotalEccErrors, gpus[0], 1, 0)]",
    )
    assert answer == [0, "error 3", 3]


def test_link_field_reads_one_link_or_all(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "gpu 0 set nvlink.4.state=0 nvlink.4.replay=7 nvlink.5.replay=1"),
        "answer = fields(gpus[0], (165, 4), (165, 5), (161, 4), (161, 0xFFFFFFFF), (165, 18), 91)",
    )
    assert answer == [0, 1, 7, 8, "error 2", 18]


def test_failed_field_leaves_the_others_readable(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "gpu 0 fail field 144 999", "gpu 0 set remap.uncorrectable=3"),
        """
        answer = [fields(gpus[0], 143, 144, 145, 9999)]
        send("gpu 0 fail field 144 0")
        answer.append(fields(gpus[0], 144))
        """,
    )
    assert answer == [[3, "error 999", 0, "error 3"], [0]]


def test_failed_link_leaves_the_others_readable(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "gpu 0 fail link 4 999"),
        """
        answer = [fields(gpus[0], (165, 3), (165, 4), (161, 0xFFFFFFFF))]
        answer += [n.nvmlDeviceGetNvLinkState(gpus[0], 3), refused(n.nvmlDeviceGetNvLinkState, gpus[0], 4)]
        send("gpu 0 fail link 4 0")
        answer.append(n.nvmlDeviceGetNvLinkState(gpus[0], 4))
        """,
    )
    assert answer == [[1, "error 999", "error 999"], 1, 999, 1]


def test_margin_is_signed(tmp_path: Path) -> None:
    code = """
        value = n.nvmlDeviceGetFieldValues(gpus[0], [193])[0]
        answer = [value.valueType == n.NVML_VALUE_TYPE_SIGNED_INT, value.value.siVal]
        """
    assert play(fake_nvml(tmp_path), code) == [True, -8]


@pytest.mark.parametrize(
    ("branch", "answers"),
    [(535, ["error 3", "error 3"]), (570, [0, "error 3"]), (575, [5, "error 3"]), (580, [0, 5])],
)
def test_throttle_time_ids_depend_on_the_branch(tmp_path: Path, branch: int, answers: list[object]) -> None:
    fake = fake_nvml(tmp_path, "gpu 0 set throttle.sw_thermal=5 power.smoothing=0", branch=branch)
    assert play(fake, "answer = fields(gpus[0], 251, 269)") == answers


# --- branches ------------------------------------------------------------------------------------------


def test_old_branch_lacks_newer_functions(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "gpu 0 set recovery_action=1", branch=535),
        """
        answer = [n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetNVMLVersion(), fields(gpus[0], 230),
                  n.nvmlDeviceGetSupportedEventTypes(gpus[0]),
                  refused(n.nvmlDeviceRegisterEvents, gpus[0], 0x8008, n.nvmlEventSetCreate())]
        for call in (n.nvmlDeviceGetMarginTemperature, n.nvmlDeviceGetNumaNodeId):
            try:
                call(gpus[0])
            except n.NVMLError_FunctionNotFound:
                answer.append("not found")
        """,
    )
    assert answer == ["535.183.06", "12.535.183.06", ["error 3"], 0x11F, 3, "not found", "not found"]


@pytest.mark.parametrize("branch", BRANCHES)
def test_library_exports_only_nvml_names_under_its_soname(branch: int) -> None:
    shown = subprocess.check_output(["readelf", "-dW", "--dyn-syms", library(branch)], text=True)
    assert "soname: [libnvidia-ml.so.1]" in shown
    exported = re.findall(r"FUNC +GLOBAL +DEFAULT +\d+ (\w+)", shown)
    declared = {*re.findall(r"X\([^,]+, (nvml\w+),", HEADER.read_text()), "nvmlInitWithFlags"}
    newer = {"UnrepairableMemoryFlag_v1"} if branch < 590 else set()
    if branch < 580:
        newer |= {"RepairStatus"}
    if branch < 570:
        newer |= {"NumaNodeId", "SramEccErrorStatus", "TemperatureV", "MarginTemperature", "GpuFabricInfoV"}
    assert set(exported) == declared - {f"nvmlDeviceGet{name}" for name in newer}


# --- events --------------------------------------------------------------------------------------------


def test_event_reaches_only_earlier_registrations(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "profile h100 gpus=2", "gpu 1 xid 48"),
        """
        late = n.nvmlEventSetCreate()
        early = watch(gpus[1])
        send("gpu 1 xid 31", "gpu 0 xid 13", "gpu 1 xid 48 gi=1 ci=0", "gpu 1 event 0x8000 data=1")
        n.nvmlDeviceRegisterEvents(gpus[1], n.nvmlEventTypeXidCriticalError, late)
        answer = [event(early) for _ in range(3)] + [refused(event, early, 0), refused(event, late, 20)]
        """,
    )
    whole = [WHOLE_GPU, WHOLE_GPU]
    assert answer == [[1, 8, 31, *whole], [1, 8, 48, 1, 0], [1, 0x8000, 1, *whole], 10, 10]


def test_wait_is_woken_by_the_timeline(tmp_path: Path) -> None:
    numbers = range(200, 0, -1)  # a busy machine may miss the first ones: the time counts from nvmlInit
    answer = play(
        fake_nvml(tmp_path, *(f"at {100 * number}ms gpu 0 xid {number}" for number in numbers)),
        "events = watch(gpus[0])\nanswer = [event(events)[2], event(events)[2]]",
    )
    assert answer[0] + 1 == answer[1]


def test_wait_returns_the_scenarios_code_then_recovers(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path),
        """
        events = watch(gpus[0])
        threading.Timer(0.1, send, ["wait 999"]).start()
        answer = [refused(event, events)]
        send("wait 0", "gpu 0 xid 31")
        answer.append(event(events)[2])
        """,
    )
    assert answer == [999, 31]


def test_storm_delivers_all_of_its_events(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path),
        """
        events, seen = watch(gpus[0]), 0
        send("storm gpu 0 xid 31 rate=1000 for=1s")
        while seen < 1000:
            event(events)
            seen += 1
        answer = refused(event, events, 200)
        """,
    )
    assert answer == pynvml.NVML_ERROR_TIMEOUT

"""The GPU watch through cffi: the fake NVML's quantities arrive as samples for every driver branch."""

import os
import select
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S

from agent.errors import ConfigError
from agent.model.gpu import (
    UNSUPPORTED_CODES,
    WHOLE_GPU,
    GpuEvent,
    GpuField,
    GpuSample,
    GpuWakeCondition,
    GpuWakeMode,
    NvmlReturnCode,
    NvmlSample,
)
from agent.model.reading import Absence, Missing, Reading, SourceState
from agent.model.time import NS
from agent.native.gpu_records import READINGS_BYTES, GpuRecordDecoder, decode_readings, status_text
from agent.native.gpu_watch import GpuWatch, GpuWatchOptions
from tests.fake_nvml import FakeNvml, fake_nvml

MS: Final = NS // 1000
QUICK: Final = GpuWatchOptions(  # deadlines long enough that a slow thread does not count as hung
    period_ns=20 * MS, slow_ns=60 * MS, deadline_ns=60 * NS, open_deadline_ns=60 * NS, retry_ns=100 * MS
)

SET: Final = {
    "recovery_action": (GpuField.RECOVERY_ACTION, 2),
    "remap.correctable": (GpuField.REMAP_CORRECTABLE, 3),
    "remap.uncorrectable": (GpuField.REMAP_UNCORRECTABLE, 4),
    "remap.pending": (GpuField.REMAP_PENDING, 1),
    "remap.failure": (GpuField.REMAP_FAILURE, 1),
    "repair.channel": (GpuField.CHANNEL_REPAIR_PENDING, 1),
    "repair.tpc": (GpuField.TPC_REPAIR_PENDING, 1),
    "memory.unrepairable": (GpuField.UNREPAIRABLE_MEMORY, 1),
    "retired.sbe": (GpuField.RETIRED_SBE, 5),
    "retired.dbe": (GpuField.RETIRED_DBE, 6),
    "retired.pending": (GpuField.RETIRED_PENDING, 1),
    "pcie.replay": (GpuField.PCIE_REPLAY, 7),
    "temperature.memory": (GpuField.MEM_TEMP, 91),
    "policy.power": (GpuField.SLOWED_SW_POWER, 1_000_000_007),
    "throttle.sw_thermal": (GpuField.SLOWED_SW_THERMAL, 11),
    "throttle.hw_thermal": (GpuField.SLOWED_HW_THERMAL, 12),
    "throttle.power_brake": (GpuField.SLOWED_HW_BRAKE, 13),
    "temperature": (GpuField.TEMP, 71),
    "temperature.margin": (GpuField.MARGIN, -4),
    "clocks.reasons": (GpuField.CLOCK_REASONS, 0x48),
    "ecc.mode": (GpuField.ECC_MODE, 1),
    "ecc.mode_pending": (GpuField.ECC_MODE_PENDING, 0),
    "ecc.dram.uncorrectable.volatile": (GpuField.ECC_UNCORRECTABLE_DRAM, 21),
    "ecc.sram.uncorrectable.volatile": (GpuField.ECC_UNCORRECTABLE_SRAM, 22),
    "ecc.dram.correctable.volatile": (GpuField.ECC_CORRECTABLE_DRAM, 23),
    "ecc.sram.correctable.volatile": (GpuField.ECC_CORRECTABLE_SRAM, 24),
    "ecc.dram.uncorrectable.aggregate": (GpuField.ECC_UNCORRECTABLE_DRAM_LIFE, 31),
    "ecc.sram.uncorrectable.aggregate": (GpuField.ECC_UNCORRECTABLE_SRAM_LIFE, 32),
    "ecc.dram.correctable.aggregate": (GpuField.ECC_CORRECTABLE_DRAM_LIFE, 33),
    "ecc.sram.correctable.aggregate": (GpuField.ECC_CORRECTABLE_SRAM_LIFE, 34),
    "ecc.sram.parity.volatile": (GpuField.SRAM_PARITY, 27),
    "ecc.sram.secded.volatile": (GpuField.SRAM_SECDED, 6),
    "ecc.sram.threshold": (GpuField.SRAM_THRESHOLD, 1),
    "fabric.state": (GpuField.FABRIC_STATE, 2),
    "fabric.status": (GpuField.FABRIC_STATUS, 999),
    "fabric.health": (GpuField.FABRIC_HEALTH, 0x1A9),
    "fabric.summary": (GpuField.FABRIC_SUMMARY, 2),
    "pcie.width": (GpuField.PCIE_WIDTH, 8),
    "pcie.gen": (GpuField.PCIE_GEN, 1),
    "pstate": (GpuField.PSTATE, 8),
    "utilization.gpu": (GpuField.UTILIZATION, 77),
    "persistence": (GpuField.PERSISTENCE, 0),
    "temperature.shutdown": (GpuField.TEMP_SHUTDOWN, 101),
    "temperature.slowdown": (GpuField.TEMP_SLOWDOWN, 102),
    "temperature.gpu_max": (GpuField.TEMP_GPU_MAX, 103),
    "temperature.memory_max": (GpuField.TEMP_MEM_MAX, 104),
    "pcie.width_max": (GpuField.PCIE_WIDTH_MAX, 16),
    "pcie.gen_max": (GpuField.PCIE_GEN_MAX, 4),
    "nvlink.3.state": (GpuField.LINKS_UP, 0x3FFF7),
    "nvlink.1.replay": (GpuField.LINK_REPLAY, 41),
    "nvlink.1.recovery": (GpuField.LINK_RECOVERY, 42),
    "nvlink.2.crc_flit": (GpuField.LINK_CRC, 43),
}
"""Quantity of the fake, the field that reads it, and the expected value."""
SUMS: Final = {
    GpuField.SRAM_SECDED: 22 + 6,
    GpuField.ECC_UNCORRECTABLE: 43,
    GpuField.ECC_CORRECTABLE: 47,
    GpuField.ECC_UNCORRECTABLE_LIFE: 63,
    GpuField.ECC_CORRECTABLE_LIFE: 67,
    GpuField.ARCHITECTURE: 9,
    GpuField.MIG_MODE: 0,
}
NO_NVLINK5: Final = {
    GpuField.LINK_RECEIVE_ERRORS,
    GpuField.LINK_RECOVERY_FAILED,
    GpuField.LINK_EFFECTIVE_ERRORS,
    GpuField.LINK_SYMBOL_ERRORS,
}
AER: Final = {GpuField.AER_CORRECTABLE, GpuField.AER_NONFATAL, GpuField.AER_FATAL}
MEMORY: Final = {GpuField.UNREPAIRABLE_MEMORY}
REPAIRS: Final = {GpuField.CHANNEL_REPAIR_PENDING, GpuField.TPC_REPAIR_PENDING, *MEMORY}
THROTTLE: Final = {GpuField.SLOWED_SW_THERMAL, GpuField.SLOWED_HW_THERMAL, GpuField.SLOWED_HW_BRAKE}
LACKING: Final = {
    590: NO_NVLINK5 | AER,
    580: NO_NVLINK5 | AER | MEMORY,
    575: NO_NVLINK5 | AER | REPAIRS | {GpuField.FABRIC_SUMMARY},
    570: NO_NVLINK5 | AER | REPAIRS | {GpuField.FABRIC_SUMMARY} | THROTTLE,
    535: NO_NVLINK5
    | AER
    | REPAIRS
    | THROTTLE
    | {GpuField.FABRIC_SUMMARY, GpuField.FABRIC_HEALTH, GpuField.RECOVERY_ACTION, GpuField.MARGIN}
    | {GpuField.SRAM_THRESHOLD, GpuField.SRAM_PARITY, GpuField.SRAM_SECDED},
}


class Watched:
    """Fake NVML with a watch on it."""

    def __init__(self, fake: FakeNvml, options: GpuWatchOptions, sysfs: Path) -> None:
        self.fake = fake
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.gpus = GpuWatch(replace(options, library=str(fake.library), sysfs_root=sysfs), self.fd)

    def close(self) -> None:
        self.gpus.stop(PATIENCE_S)
        os.close(self.fd)

    def read(self) -> NvmlSample:
        now = self.gpus.read()
        assert now is not None
        return now

    def until(self, happened: Callable[[NvmlSample], bool]) -> NvmlSample:
        """Wait for a sample that fulfils the condition, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        while not happened(now := self.read()):
            assert time.monotonic() < deadline, now
            time.sleep(0.005)
        return now

    def was_woken(self) -> bool:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True


Watch = Callable[..., Watched]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Start a watch on the GPUs of a scenario."""
    begun: list[Watched] = []

    def start_watch(*lines: str, branch: int = 580, options: GpuWatchOptions = QUICK) -> Watched:
        fake = fake_nvml(tmp_path, *lines, branch=branch)
        # the library keeps its scenario while its file is loaded, and is never unloaded
        fake = replace(fake, library=Path(shutil.copy(fake.library, tmp_path / "libnvidia-ml.so.1")))
        monkeypatch.setenv("FAKE_NVML", str(fake.scenario))
        begun.append(Watched(fake, options, tmp_path / "sys"))
        assert begun[-1].gpus.read() is None
        begun[-1].gpus.start()
        return begun[-1]

    yield start_watch
    for watched in begun:
        watched.close()


def is_read(gpus: int) -> Callable[[NvmlSample], bool]:
    """Return a condition: so many GPUs have been read completely, slow fields included."""
    return lambda now: len(now.gpus) == gpus and all(gpu.slow_passes > 2 for gpu in now.gpus)


@pytest.mark.parametrize("branch", [535, 570, 575, 580, 590])
def test_every_quantity_arrives_in_its_field(watch: Watch, branch: int) -> None:
    values = {name: want for name, (_, want) in SET.items()} | {"nvlink.3.state": 0}
    lines = [f"gpu 1 set {name}={value}" for name, value in values.items()]
    watched = watch("profile h100 gpus=2", *lines, branch=branch)
    first, second = watched.until(is_read(2)).gpus
    expected: Mapping[GpuField, Reading] = dict(SET.values()) | SUMS
    for field in GpuField:
        if field in LACKING[branch]:
            assert second[field] == Missing(Absence.ABSENT, 2 if field in AER else 0), field
        else:
            assert second[field] == expected[field], field
    assert first[GpuField.TEMP] == 33
    assert second.links == 18
    assert second.link_errors[:4] == (0, 83, 43, 0)


def test_gpu_has_its_identity(watch: Watch) -> None:
    watched = watch("profile a100 gpus=2")
    now = watched.until(is_read(2))
    assert [gpu.index for gpu in now.gpus] == [0, 1]
    assert now.gpus[1].uuid == "GPU-fa4e0007-0000-4000-8000-000000000001"
    assert now.gpus[1].bus == "0000:43:00.0"
    assert now.gpus[1].name == "NVIDIA A100-SXM4-40GB"
    assert now.gpus[1].serial
    assert (now.driver, now.library, now.count, now.generation) == ("580.95.05", "13.580.95.05", 2, 1)
    assert (now.nvml.state, now.nvml.detail) == (SourceState.OK, "")
    now = watched.until(lambda now: now.events.state is SourceState.OK)
    assert now.gpus[0].event_mask & GpuEvent.XID


def test_mig_devices_and_events_name_their_instances(watch: Watch) -> None:
    watched = watch("profile h100 gpus=1")
    watched.until(lambda now: any(gpu.event_mask for gpu in now.gpus))
    watched.fake.send("gpu 0 mig 3g.40gb 1g.10gb", "gpu 0 xid 94 gi=1 ci=0", "gpu 0 xid 79", "gpu 0 xid 79")
    (gpu,) = watched.until(lambda now: len(now.gpus[0].migs) == 2 and len(now.gpus[0].xids) == 2).gpus
    gpu = watched.until(lambda now: now.gpus[0].xids[1].times == 2).gpus[0]
    assert [(mig.gi, mig.ci) for mig in gpu.migs] == [(1, 0), (7, 0)]
    assert all(mig.uuid.startswith("MIG-") for mig in gpu.migs)
    assert [(xid.code, xid.gi, xid.ci, xid.times) for xid in gpu.xids] == [
        (94, 1, 0, 1),
        (79, WHOLE_GPU, WHOLE_GPU, 2),
    ]
    assert gpu.events[GpuEvent.XID].times == 3
    assert gpu.events[GpuEvent.MIG_CONFIG].times == 1
    assert GpuEvent.UNAVAILABLE not in gpu.events


def test_exceeded_cpu_budget_stretches_the_period_and_delays_no_event(watch: Watch) -> None:
    watched = watch("profile h100 gpus=1", options=replace(QUICK, cpu_budget_ns=1))
    watched.until(lambda now: any(gpu.period_ns == 10 * NS for gpu in now.gpus))
    costs = watched.gpus.costs()
    assert costs.period_s == 10
    assert costs.cpu_s > 0
    assert costs.switches > 0
    passes = watched.read().gpus[0].passes
    watched.fake.send("gpu 0 xid 79")
    assert watched.until(lambda now: bool(now.gpus[0].xids)).gpus[0].passes <= passes + 1


def test_costs_of_calls_are_measured_by_kind(watch: Watch) -> None:
    watched = watch("profile h100 gpus=2")
    watched.until(is_read(2))
    watched.until(lambda now: now.events.passes > 0)  # the waiter publishes a wait after its end
    costs = watched.gpus.costs()
    assert costs.period_s == QUICK.period_ns / NS
    of_gpus = {
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetMarginTemperature",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetTemperatureThreshold",
    }
    kinds = {call.kind for call in costs.calls}
    assert kinds >= of_gpus | {"nvmlDeviceGetHandleByUUID", "dlopen", "nvmlInit", "nvmlEventSetWait"}
    assert "" not in kinds
    seen = [gpu.passes for gpu in watched.read().gpus]
    watched.until(
        lambda now: all(gpu.passes > was + 1 for gpu, was in zip(now.gpus, seen, strict=True))
    )  # the CPU time of a pass counts at its end, and that of its calls before
    cpu_s = watched.gpus.costs().cpu_s
    for call in costs.calls:
        assert call.calls > 0
        assert call.cpu_s > 0
        assert call.duration_s > 0
    assert sum(call.cpu_s for call in costs.calls if call.kind in of_gpus) <= cpu_s


def test_dropped_xids_are_reported_by_the_event_source(watch: Watch) -> None:
    room = 48
    watched = watch("profile h100 gpus=1")
    watched.until(lambda now: any(gpu.event_mask for gpu in now.gpus))
    watched.fake.send(*(f"gpu 0 xid {code}" for code in range(1, room + 1)))
    now = watched.until(
        lambda now: len(now.gpus[0].xids) == room and now.events.state is not SourceState.STARTING
    )
    assert (now.events.state, now.events.detail) == (SourceState.OK, "")
    watched.fake.send(*(f"gpu 0 xid {code}" for code in range(room + 1, room + 3)))
    now = watched.until(lambda now: now.gpus[0].xids_forgotten == 2)
    assert (now.events.state, now.events.detail) == (SourceState.OK, "2 XIDs were dropped for lack of room")


def test_lost_gpu_is_unreadable_and_never_zero(watch: Watch) -> None:
    watched = watch("profile h100 gpus=2")
    before = watched.until(is_read(2)).gpus[1]
    watched.fake.send("gpu 1 lost")
    good, lost = watched.until(lambda now: now.gpus[1].status == NvmlReturnCode.LOST).gpus
    assert good.status == NvmlReturnCode.OK
    for field, reading in before.readings.items():
        assert isinstance(lost[field], Missing)
        if not isinstance(reading, Missing):
            assert lost[field] == Missing(Absence.UNREADABLE), field
    assert (lost.uuid, lost.bus, lost.handles) == (before.uuid, before.bus, 1)
    watched.fake.send("gpu 1 back")
    assert watched.until(lambda now: now.gpus[1].status == NvmlReturnCode.OK).gpus[1].handles == 2


@pytest.mark.parametrize("code", sorted(UNSUPPORTED_CODES))
def test_unsupported_field_is_absent_unless_read_before(watch: Watch, code: int) -> None:
    failing = f"gpu 0 fail nvmlDeviceGetSramEccErrorStatus {code}"
    watched = watch("profile h100 gpus=2", failing)
    never, before = watched.until(is_read(2)).gpus
    assert never[GpuField.SRAM_THRESHOLD] == Missing(Absence.ABSENT)
    assert before[GpuField.SRAM_THRESHOLD] == 0
    watched.fake.send(failing.replace("gpu 0", "gpu 1"))
    watched.until(lambda now: now.gpus[1][GpuField.SRAM_THRESHOLD] == Missing(Absence.UNREADABLE))


def test_hung_call_is_named(watch: Watch) -> None:
    watched = watch("profile h100 gpus=2", options=replace(QUICK, deadline_ns=100 * MS))
    watched.until(is_read(2))
    watched.fake.send("gpu 0 hang nvmlDeviceGetTemperature")
    watched.until(lambda _: watched.fake.send("gpu 0 hung") == "1")
    call_ns = watched.read().gpus[0].call_ns
    watched.until(lambda _: time.monotonic_ns() - call_ns >= 100 * MS)
    hung, other = watched.until(lambda now: now.gpus[0].overdue > 0).gpus
    assert (hung.call, hung.call_ns) == ("nvmlDeviceGetTemperature", call_ns)
    passes = other.passes
    watched.until(lambda now: now.gpus[1].passes > passes + 5)
    assert not watched.gpus.stop(0.5)  # returns before the call does
    assert watched.gpus.stop(0.5)  # nothing left to stop
    watched.fake.send("gpu 0 release")


def test_only_fields_with_a_wake_wake_the_reader(watch: Watch) -> None:
    pending = GpuWakeCondition(GpuField.REMAP_PENDING)
    hot = GpuWakeCondition(GpuField.MARGIN, GpuWakeMode.BELOW, threshold=-2)
    watched = watch("profile h100 gpus=1", options=replace(QUICK, wakes=[pending, hot]))
    watched.until(lambda now: is_read(1)(now) and now.events.state is SourceState.OK)

    def passes_on(times: int = 5) -> None:
        seen = watched.read().gpus[0].passes
        watched.until(lambda now: now.gpus[0].passes > seen + times)

    passes_on()
    while watched.was_woken():
        pass
    changes = watched.read().gpus[0].changes
    assert changes
    watched.fake.send("gpu 0 set temperature=60 ecc.dram.correctable.volatile=9 temperature.margin=-2")
    deadline = time.monotonic() + PATIENCE_S
    while watched.read().gpus[0][GpuField.MARGIN] != -2:
        assert time.monotonic() < deadline
    passes = watched.read().gpus[0].passes
    while watched.read().gpus[0].passes < passes + 3:
        assert time.monotonic() < deadline
    assert not watched.was_woken()
    assert watched.read().gpus[0].changes == changes
    for change in ("temperature.margin=-3", "temperature.margin=5", "remap.pending=1"):
        watched.fake.send(f"gpu 0 set {change}")
        assert select.select([watched.fd], [], [], PATIENCE_S)[0], change
        assert watched.was_woken()
        changes += 1
        assert watched.read().gpus[0].changes == changes


def test_missing_library_is_absent_not_failing(watch: Watch, tmp_path: Path) -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    gpus = GpuWatch(replace(QUICK, library=str(tmp_path / "none.so")), fd)
    gpus.start()
    assert select.select([fd], [], [], PATIENCE_S)[0]
    deadline = time.monotonic() + PATIENCE_S
    while (now := gpus.read()) is None or now.nvml.state is SourceState.STARTING:
        assert time.monotonic() < deadline
    assert now.nvml.state is SourceState.ABSENT
    assert "none.so" in now.nvml.detail
    assert now.err == NvmlReturnCode.LIBRARY_NOT_FOUND
    assert now.gpus == ()
    assert gpus.stop(PATIENCE_S)
    os.close(fd)


def test_unusable_library_is_reported_with_its_cause(watch: Watch) -> None:
    watched = watch("profile h100 gpus=1", "init 18")
    now = watched.until(lambda now: now.nvml.state is SourceState.FAILING)
    assert now.err == NvmlReturnCode.MISMATCH
    assert (
        now.nvml.detail
        == status_text(NvmlReturnCode.MISMATCH)
        == "driver and library are of different versions"
    )
    watched.fake.send("init 0")
    assert watched.until(is_read(1)).nvml.detail == ""


def test_section_with_unchanged_bytes_is_not_decoded_again(watch: Watch) -> None:
    watched = watch("profile h100 gpus=1")
    first = watched.until(is_read(1)).gpus[0]
    second = watched.until(lambda now: now.gpus[0].passes > first.passes).gpus[0]
    assert second.readings is first.readings
    assert second.xids is first.xids
    watched.fake.send("gpu 0 set temperature=99")
    third = watched.until(lambda now: now.gpus[0][GpuField.TEMP] == 99).gpus[0]
    assert third.readings is not first.readings
    assert third.link_errors is first.link_errors


def test_sample_before_its_first_pass_is_starting() -> None:
    """A record that its thread has not written yet decodes as starting."""
    from agent.native._core import ffi, lib

    head = ffi.new("struct dh_gpus *", {"gpus": 1, "state": lib.DH_STATE_STARTING})
    now = GpuRecordDecoder().decode(ffi.buffer(head)[:] + bytes(ffi.sizeof("struct dh_gpu")))
    assert now.nvml.state is SourceState.STARTING
    (gpu,) = now.gpus
    assert isinstance(gpu, GpuSample)
    assert (gpu.passes, gpu.uuid, gpu.call, gpu.migs, gpu.xids, dict(gpu.events)) == (0, "", "", (), (), {})
    assert all(gpu[field] == Missing(Absence.ABSENT) for field in GpuField)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (replace(QUICK, period_ns=MS), "period 0.001 s"),
        (replace(QUICK, deadline_ns=601 * NS), "deadline 601 s"),
        (replace(QUICK, retry_ns=MS), "retry 0.001 s"),
        (replace(QUICK, library="x" * 4001), "4001 bytes, limit 4000"),
        (replace(QUICK, sysfs_root=Path("/" + "x" * 200)), "201, limit 200"),
    ],
)
def test_option_out_of_range_is_named(options: GpuWatchOptions, says: str) -> None:
    fd = os.eventfd(0)
    with pytest.raises(ConfigError, match=says):
        GpuWatch(options, fd)
    os.close(fd)


@given(st.binary(min_size=READINGS_BYTES, max_size=READINGS_BYTES), st.data())
def test_changed_values_decode_like_whole_readings(before: bytes, data: st.DataObject) -> None:
    known = decode_readings(before)
    now = bytearray(before)
    for at in data.draw(st.lists(st.integers(0, READINGS_BYTES - 1), max_size=5)):
        now[at] = data.draw(st.integers(0, 255))
    assert decode_readings(bytes(now), known).readings == decode_readings(bytes(now)).readings

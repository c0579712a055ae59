"""Comparison of two readers of the same GPUs: C core and pynvml."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agents import run_command
from fake_nvml import BRANCHES, FakeNvml, fake_nvml
from machine import machine_lock

from agent.cli.output.terminal import TextStyle
from agent.cli.scan import (
    CHANGING_FIELDS,
    FieldAgreement,
    compare_gpus,
    compare_readings,
    confirm_moved,
    cross_check,
    crosscheck_document,
    gpu_documents,
    read_within,
    render_check,
    render_gpus,
)
from agent.config.config import Config
from agent.errors import ProbeError
from agent.model.gpu import GpuField, GpuSample, NvmlSample
from agent.model.reading import Absence, Missing, SourceSample, SourceState
from agent.model.time import NS
from agent.native import gpu_watch
from agent.sources.nvml import NvmlFailure
from agent.sources.nvml_reference import READERS, ReferenceGpu

REPOSITORY = Path(__file__).parent.parent
ABSENT = Missing(Absence.ABSENT)
REFUSED = NvmlFailure(3, "not supported")
PLAIN = TextStyle()


# --- comparison of a field ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "pynvml", "after", "standing"),
    [
        (5, 5, 5, FieldAgreement.AGREES),
        (5, 6, 7, FieldAgreement.AGREES),
        (7, 6, 5, FieldAgreement.AGREES),
        (-5, -5, -5, FieldAgreement.AGREES),
        (5, 4, 7, FieldAgreement.DIFFERS),
        (5, 8, 7, FieldAgreement.DIFFERS),
        (0, REFUSED, 0, FieldAgreement.DIFFERS),
        (ABSENT, 0, ABSENT, FieldAgreement.DIFFERS),
        (ABSENT, REFUSED, ABSENT, FieldAgreement.UNREAD),
        (5, REFUSED, ABSENT, FieldAgreement.MOVED),
        (ABSENT, REFUSED, 5, FieldAgreement.MOVED),
        (ABSENT, 5, 5, FieldAgreement.AGREES),
        (5, 6, ABSENT, FieldAgreement.DIFFERS),
    ],
)
def test_counter_between_two_reads_agrees(before, pynvml, after, standing):
    assert compare_readings(GpuField.ECC_CORRECTABLE, before, pynvml, after) is standing


@pytest.mark.parametrize("field", sorted(CHANGING_FIELDS))
def test_fluctuating_field_may_be_outside_of_both_reads(field):
    assert compare_readings(field, 40, 43, 41) is FieldAgreement.MOVED
    assert compare_readings(field, 40, 40, 41) is FieldAgreement.AGREES
    assert compare_readings(field, 40, REFUSED, 41) is FieldAgreement.DIFFERS


# --- all GPUs ----------------------------------------------------------------------------------------------


def source(state: SourceState, detail: str = "") -> SourceSample:
    return SourceSample("nvml", state, beat_ns=1, period_ns=1, failures=0, detail=detail)


def native(*gpus: GpuSample, state: SourceState = SourceState.OK, detail: str = "") -> NvmlSample:
    return NvmlSample(gpus, source(state, detail), source(SourceState.OK))


def gpu(index: int, **readings: int) -> GpuSample:
    """Return a GPU with only these fields readable."""
    return GpuSample(
        index=index,
        uuid=f"GPU-{index}",
        bus=f"0000:0{index}:00.0",
        name="H100",
        serial="",
        status=0,
        passes=2,
        beat_ns=1,
        period_ns=1,
        readings={GpuField(name): value for name, value in readings.items()},
    )


def reference_reader(index: int, uuid: str | None = None, **readings: int) -> ReferenceGpu:
    fields = {field: readings.get(field.value, REFUSED) for field in GpuField}
    return ReferenceGpu(f"GPU-{index}" if uuid is None else uuid, f"0000:0{index}:00.0", fields)


def test_agreeing_readers_have_no_differences():
    seen = native(gpu(0, temp=40), gpu(1, temp=50))
    check = compare_gpus(seen, [reference_reader(0, temp=40), reference_reader(1, temp=50)], seen)
    assert not check.differs
    assert render_check(check, PLAIN) == (
        f"  backends  2 readings of C core and pynvml agree, 0 differ, 0 changed in between, "
        f"{2 * len(GpuField) - 2} cannot be read by either\n"
    )


def test_difference_names_gpu_field_and_both_values():
    seen = native(gpu(0, ecc_correctable=5, temp=40))
    check = compare_gpus(seen, [reference_reader(0, ecc_correctable=7, temp=44)], seen)
    assert check.differs
    assert render_check(check, PLAIN).splitlines()[1:] == [
        "  differs   GPU-0 ecc_correctable: native 5, pynvml 7",
        "  moved     GPU-0 temp: native 40, pynvml 44",
    ]
    document = crosscheck_document(check)
    assert (document["agrees"], document["differs"], document["moved"]) == (0, 1, 1)
    assert document["fields"][0] == {
        "gpu": "GPU-0",
        "field": "ecc_correctable",
        "standing": "differs",
        "native": [5, 5],
        "pynvml": 7,
    }


def test_value_from_the_second_read_is_accepted():
    check = compare_gpus(
        native(gpu(0, pcie_replay=1)), [reference_reader(0, pcie_replay=2)], native(gpu(0, pcie_replay=2))
    )
    assert not check.differs
    check = compare_gpus(
        native(gpu(0, pcie_replay=1)), [reference_reader(0, pcie_replay=3)], native(gpu(0, pcie_replay=2))
    )
    assert "native 1, then 2, pynvml 3" in render_check(check, PLAIN)


@pytest.mark.parametrize(
    ("native_temps", "pynvml_temps", "agreement"),
    [
        ((0, 0, 0), (40, 40), FieldAgreement.DIFFERS),
        ((0, 0, 0), (40, 41), FieldAgreement.MOVED),
        ((40, 40, 41), (43, 43), FieldAgreement.MOVED),
        ((40, 41, 41), (43, 43), FieldAgreement.MOVED),
        ((40, 40, 43), (43, 43), FieldAgreement.MOVED),
    ],
)
def test_field_with_a_constant_difference_has_not_moved(native_temps, pynvml_temps, agreement):
    samples = [native(gpu(0, temp=temp)) for temp in native_temps]
    first, second = ([reference_reader(0, temp=temp)] for temp in pynvml_temps)
    check = compare_gpus(samples[0], first, samples[1])
    assert [c.agreement for c in check.comparisons if c.field is GpuField.TEMP] == [FieldAgreement.MOVED]
    confirmed = confirm_moved(check, compare_gpus(samples[1], second, samples[2]))
    assert [c.agreement for c in confirmed.comparisons if c.field is GpuField.TEMP] == [agreement]
    assert confirmed.differs == (agreement is FieldAgreement.DIFFERS)


def test_moved_field_of_a_gpu_that_goes_away_stays_moved():
    seen = native(gpu(0, temp=40))
    check = compare_gpus(seen, [reference_reader(0, temp=44)], seen)
    assert confirm_moved(check, compare_gpus(seen, "GPU is lost", seen)) == check


def test_gpus_are_matched_by_uuid_in_any_order():
    seen = native(gpu(0, temp=40), gpu(1, temp=50))
    assert not compare_gpus(seen, [reference_reader(1, temp=50), reference_reader(0, temp=40)], seen).differs


def test_gpu_without_uuid_is_matched_by_its_index():
    seen = native(gpu(0, temp=40), gpu(1))
    check = compare_gpus(seen, [reference_reader(0, temp=40), reference_reader(1, uuid="")], seen)
    assert not check.differs
    assert {comparison.gpu for comparison in check.comparisons} == {"GPU-0", "GPU 1"}


def test_gpu_seen_by_one_reader_only_is_a_difference():
    seen = native(gpu(0, temp=40))
    check = compare_gpus(seen, [reference_reader(0, temp=40), reference_reader(1, temp=50)], seen)
    assert check.problems == ("GPU-1: not found by the C core",)
    seen = native(gpu(0, temp=40), replace(gpu(1), uuid=""))
    check = compare_gpus(seen, [reference_reader(0, temp=40)], seen)
    assert check.problems == ("GPU 1: not found by pynvml",)
    assert check.differs


def test_nvml_unusable_for_one_reader_is_a_difference():
    absent = native(state=SourceState.ABSENT, detail="no library")
    assert compare_gpus(absent, [], absent).problems == ("only pynvml can use NVML; C core: no library",)
    seen = native(gpu(0))
    assert compare_gpus(seen, "no library", seen).problems == (
        "only the C core can use NVML; pynvml: no library",
    )


def test_nvml_unusable_for_both_readers_is_agreement():
    absent = native(state=SourceState.ABSENT, detail="no library")
    check = compare_gpus(absent, "libnvidia-ml.so.1: cannot open", absent)
    assert not check.differs
    assert render_check(check, PLAIN) == "  backends  neither can use NVML: libnvidia-ml.so.1: cannot open\n"


def test_pynvml_table_has_a_column_for_each_gpu():
    lines = render_gpus([reference_reader(0, temp=40), reference_reader(1, temp=-5)], PLAIN).splitlines()
    assert lines[:2] == ["  0  GPU-0  0000:00:00.0", "  1  GPU-1  0000:01:00.0"]
    assert [line.split() for line in lines if line.startswith("temp ")] == [["temp", "40", "-5"]]
    assert len(lines) == 3 + len(GpuField)
    assert gpu_documents([reference_reader(0, temp=40)])[0]["readings"]["margin"] == "not supported (3)"


def test_reference_reader_reads_every_field():
    assert set(READERS) == set(GpuField)


def test_hung_read_is_abandoned():
    release, acquired = os.pipe()
    with pytest.raises(ProbeError, match=r"pynvml: no answer within 0.05 s"):
        read_within(0.05, lambda: os.read(release, 1))
    os.write(acquired, b"x")


def test_failed_read_raises_in_the_caller():
    def fail() -> None:
        raise ProbeError("no NVML")

    with pytest.raises(ProbeError, match="no NVML"):
        read_within(10, fail)


# --- the command, against the fake -------------------------------------------------------------------------


def put_aer(sysfs: Path, bus: str, fatal: int) -> None:
    device = sysfs / "bus/pci/devices" / bus
    device.mkdir(parents=True)
    (device / "aer_dev_correctable").write_text("RxErr 1\nBadTLP 2\nTOTAL_ERR_COR 3\n")
    (device / "aer_dev_nonfatal").write_text("Undefined 0\nTOTAL_ERR_NONFATAL 0\n")
    (device / "aer_dev_fatal").write_text(f"Undefined 0\nTOTAL_ERR_FATAL {fatal}\n")


def scan(fake: FakeNvml, *args: str) -> tuple[int, Any]:
    """Return exit code and report; the code is also about the real CPUs, which other tests take offline."""
    code, out = scan_text(fake, "-o", "json", *args)
    return code, json.loads(out)


def scan_text(fake: FakeNvml, *args: str) -> tuple[int, str]:
    flags = ("--kmsg", "/dev/null", *args, "--nvml-library", str(fake.library))
    with machine_lock():
        done = run_command("scan", *flags, env=fake.env, cwd=REPOSITORY)
    assert done.stdout, done.stderr
    return done.returncode, done.stdout


def put_gpus(sysfs: Path, *drivers: str) -> None:
    for number, driver in enumerate(drivers):
        device = sysfs / f"bus/pci/devices/0000:{number + 1}b:00.0"
        device.mkdir(parents=True)
        for name, text in (("vendor", "0x10de"), ("device", "0x2330"), ("class", "0x030200")):
            (device / name).write_text(f"{text}\n")
        if driver:
            (device / "driver").symlink_to(f"../../drivers/{driver}")


OTHER_MACHINE = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\xf7\x00" + bytes(4000)


@pytest.mark.parametrize("content", [None, b"", OTHER_MACHINE], ids=["missing", "empty", "other machine"])
def test_scan_without_usable_library_reports_bound_gpus_unknown(tmp_path, content):
    library = tmp_path / "libnvidia-ml.so.1"
    if content is not None:
        library.write_bytes(content)
    put_gpus(tmp_path / "sys", "nvidia", "nouveau", "", "vfio-pci", "nvidia")
    code, report = scan(FakeNvml(library, library, library), "--sysfs-root", str(tmp_path / "sys"))
    gpus = {
        device["attributes"]["pciBusId"]: device for device in report["devices"] if device["kind"] == "gpu"
    }
    assert code == 3
    assert sorted(gpus) == ["0000:1b:00.0", "0000:5b:00.0"]
    for gpu in gpus.values():
        (cause,) = gpu["causes"]
        assert (gpu["health"], cause["code"]) == ("Unknown", "gpu.driver.init")
        assert f"LIBRARY_NOT_FOUND (12): {library}: " in cause["evidence"]


def test_scan_without_library_ignores_gpus_of_other_drivers(tmp_path):
    put_gpus(tmp_path / "sys", "nouveau", "", "vfio-pci")
    library = tmp_path / "none.so"
    _, report = scan(FakeNvml(library, library, library), "--sysfs-root", str(tmp_path / "sys"))
    assert [device for device in report["devices"] if device["kind"] == "gpu"] == []


def test_scan_of_gpu_without_field_values_is_unknown(tmp_path):
    fake = fake_nvml(tmp_path, "profile t4 gpus=1", "gpu 0 fail nvmlDeviceGetFieldValues 13")
    code, report = scan(fake)
    (gpu,) = [device for device in report["devices"] if device["kind"] == "gpu"]
    assert (code, gpu["health"]) == (3, "Unknown")
    assert [cause["code"] for cause in gpu["causes"]] == ["gpu.no_readings"]
    assert "PCIe replays" in gpu["causes"][0]["evidence"]


DEADLINE_S = 50.0
"""Time in which each GPU answers on a busy machine [s]; below that after which it is Unhealthy, a minute."""
CHECK = """
import itertools, json, sys
from pathlib import Path
from agent.cli.scan import cross_check
from agent.cli.scan import crosscheck_document
from agent.config.config import Config
config = Config(
    node_name="n", nvml_library=sys.argv[1], sysfs_root=Path(sys.argv[2]), gpu_deadline_ns=int(sys.argv[3])
)
if len(sys.argv) > 4:
    from agent.model.gpu import GpuField
    from agent.sources.nvml_reference import READERS
    values = itertools.count(int(sys.argv[4]), int(sys.argv[5]))
    READERS[GpuField.TEMP] = lambda gpu: next(values)
print(json.dumps(crosscheck_document(cross_check(config))))
"""


def check_of(fake: FakeNvml, sysfs: Path, *temps: int, deadline_s: float = DEADLINE_S) -> Any:
    """Return the comparison; with `temps` the reader of temperatures through pynvml is broken: it returns the
    first value, and after each read adds the second. A GPU hangs that does not answer within `deadline_s`."""
    limits = (str(round(deadline_s * 1e9)), *map(str, temps))
    command = [sys.executable, "-c", CHECK, str(fake.library), str(sysfs), *limits]
    done = subprocess.run(command, env=fake.env, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


SICK = (
    "gpu 1 set temperature=71 pcie.width=8 pcie.replay=9 policy.power=1000000000",
    "gpu 1 set ecc.dram.correctable.volatile=+7 ecc.sram.uncorrectable.volatile=+2",
)
SICK_AMPERE = (
    *SICK,
    "gpu 1 set remap.pending=1 remap.correctable=3 remap.uncorrectable=2 remap.failure=1",
    "gpu 1 set nvlink.0.state=0 nvlink.1.replay=5 temperature.margin=-5 memory.unrepairable=1",
)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("profile", ["a100", "h100", "t4"])
def test_native_core_and_pynvml_read_the_same(tmp_path, profile, branch):
    """Compare a healthy GPU, and one with distinct values in all fields."""
    sick = SICK if profile == "t4" else SICK_AMPERE
    fake = fake_nvml(tmp_path, f"profile {profile} gpus=2", *sick, branch=branch)
    put_aer(tmp_path / "sys", "0000:1b:00.0", fatal=4)
    check = check_of(fake, tmp_path / "sys")
    assert (check["fields"], check["problems"], check["note"]) == ([], [], "")
    assert check["agrees"] + check["unread"] == 2 * len(GpuField)
    assert check["agrees"] > 60


@pytest.mark.parametrize(("step", "agreement"), [(0, "differs"), (1, "moved")])
def test_constant_difference_of_a_changing_field_is_no_movement(tmp_path, step, agreement):
    check = check_of(fake_nvml(tmp_path, "profile h100"), tmp_path, 5, step)
    (field,) = check["fields"]
    assert (field["field"], field["standing"], field["native"], field["pynvml"]) == (
        "temp",
        agreement,
        [33, 33],
        5,
    )


@pytest.mark.parametrize(
    ("age_ns", "silent"),
    [
        (-600 * NS, "GPU-1 does not answer nvmlDeviceGetTemperature"),  # in time, however slow the test is
        (9 * NS, "NVML does not answer nvmlDeviceGetCount"),
    ],
)
def test_library_call_in_progress_is_no_missing_answer(monkeypatch, age_ns, silent):
    """GPU 1 hangs. GPU 0 is being opened, which may take longer, while another thread calls the library."""
    now_ns = time.monotonic_ns()
    hanging = replace(gpu(1), passes=0, call="nvmlDeviceGetTemperature", call_ns=now_ns - 9 * NS, overdue=1)
    opening = replace(gpu(0), slow_passes=1, call="nvmlDeviceGetHandleByUUID", call_ns=hanging.call_ns)
    found = replace(native(opening, hanging), count=2, call="nvmlDeviceGetCount", call_ns=now_ns - age_ns)
    watch = SimpleNamespace(start=lambda: None, read=lambda: found, stop=lambda _: None)
    monkeypatch.setattr(gpu_watch, "GpuWatch", lambda *_: watch)
    check = cross_check(Config(node_name="n", gpu_deadline_ns=5 * NS))
    assert check.not_compared_reason == f"pynvml was not called: {silent}"


def test_hung_gpu_is_not_read_with_pynvml(tmp_path):
    fake = fake_nvml(tmp_path, "profile h100 gpus=2", "gpu 1 hang nvmlDeviceGetFieldValues")
    check = check_of(fake, tmp_path, deadline_s=5)  # GPU 0 answers within this time
    assert check["note"] == "pynvml was not called: GPU 1 does not answer nvmlDeviceGetFieldValues"
    assert check["problems"] == check["fields"] == []


def test_lost_gpu_is_lost_to_both_readers(tmp_path):
    _, document = scan(fake_nvml(tmp_path, "profile h100 gpus=2", "gpu 1 lost"), "--backend", "both")
    check = document["backends"]
    assert (check["differs"], check["problems"]) == (0, [])
    assert check["unread"] >= len(GpuField)


def test_field_that_differs_between_readers_exits_3(tmp_path):
    """The C core reads by field id, pynvml by function; here the driver answers only one of the two."""
    fake = fake_nvml(tmp_path, "profile h100", "gpu 0 fail nvmlDeviceGetRemappedRows 999")
    code, document = scan(fake, "--backend", "both")
    differing = [field["field"] for field in document["backends"]["fields"]]
    assert differing == ["remap_correctable", "remap_uncorrectable", "remap_pending", "remap_failure"]
    assert document["backends"]["fields"][0]["pynvml"] == "unknown (999)"
    assert code == 3
    line = "unknown: pynvml and the C core read different values from a GPU\n"
    assert scan_text(fake, "--backend", "both", "--exit-style", "npd") == (2, line)


def test_pynvml_alone_shows_readings_and_no_verdict(tmp_path):
    fake = fake_nvml(tmp_path, "profile h100 gpus=2", "gpu 1 set temperature=77")
    code, document = scan(fake, "--backend", "pynvml")
    assert code == 0
    assert [gpu["readings"]["temp"] for gpu in document["gpus"]] == [33, 77]
    assert "devices" not in document


def test_pynvml_without_nvml_exits_as_unknown(tmp_path):
    command = [sys.executable, "-m", "agent", "scan", "--backend", "pynvml", "--nvml-library", "/none.so"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith(
        "drahealth: NVML library cannot be loaded: /none.so: cannot open shared object file"
    )


def test_scan_with_one_backend_reads_once(tmp_path):
    _, document = scan(fake_nvml(tmp_path, "profile h100"))
    assert "backends" not in document

"""State file of GPU faults: round trip, corrupt files, and disks that refuse writes."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from golden.files import RELEASE
from hypothesis import given
from hypothesis import strategies as st
from other_user import become_other_user
from small_disk import run_on_small_disk

from agent.health.gpu.faults.checkpoint import KEPT_MAX, VOLATILE_COUNTERS
from agent.health.gpu.faults.match_reports import KEPT_BURSTS, KEPT_LINES, KEPT_SWITCHES
from agent.model.cleared_faults import ClearedFault
from agent.model.gpu import WHOLE_GPU
from agent.model.health import Blame, Severity
from agent.model.persistent_faults import (
    BootBaseline,
    CpusBaseline,
    Cure,
    DriverModule,
    FrequencyBaseline,
    GpuBaseline,
    HugepagePoolBaseline,
    KnownGpu,
    MemoryBaseline,
    NicBaseline,
    NicPortBaseline,
    NumaCpusBaseline,
    PciBaseline,
    PersistentCondition,
    PersistentFault,
    PersistentState,
)
from agent.store.gpu_fault_file import (
    SIZE_MAX,
    decode_gpu_faults,
    encode_gpu_faults,
    load_gpu_faults,
    save_gpu_faults,
)
from agent.store.state_files import READ_ATTEMPTS, StateWriteError, UnusableFile
from agent.system.files import ReadError, read_bounded

GPU = KnownGpu(3, "GPU-3fa1", "0000:3b:00.0", "NVIDIA H100 80GB HBM3")
FAULT = PersistentFault(
    uuid="GPU-3fa1",
    code="gpu.xid.79",
    gi=WHOLE_GPU,
    ci=WHOLE_GPU,
    times=2,
    first_wall_s=1_790_000_000.25,
    last_wall_s=1_790_000_060.5,
    log_us=2_341_640_728,
    boot_id="5b1c3f6a-8f0f-4d4d-9f30-1d2f3e4a5b6c",
    cure=Cure.REPLACE,
    healed=False,
    evidence="XID 79: the GPU has fallen off the bus",
    advice="replace the GPU",
    severity=Severity.UNHEALTHY,
    texts=("NVRM: Xid (PCI:0000:3b:00): 79",),
)
MEMORY = PersistentState(
    (GPU,),
    (FAULT, FAULT._replace(uuid="", code="fabric.sxid.20034", healed=True, texts=())),
    module=DriverModule(FAULT.boot_id, 4711),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "gpu-faults.json"


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def changed_file(**fault: object) -> bytes:
    """Return the file with changed values in its first fault."""
    document = json.loads(encode_gpu_faults(MEMORY))
    document["faults"][0] |= fault
    return json.dumps(document).encode()


def test_saved_faults_are_loaded(path):
    save_gpu_faults(path, MEMORY)
    assert load_gpu_faults(path) == (MEMORY, "")


texts = st.text(st.characters(codec="utf-8"), max_size=20)
instances = st.integers(0, WHOLE_GPU)
times = st.floats(allow_nan=False, allow_infinity=False)
naturals = st.integers(0, 2**62)
monotonic_times = st.integers(-(2**62), 2**62)
gpus = st.lists(
    st.builds(KnownGpu, st.integers(0, 99), texts, texts, texts), max_size=4, unique_by=lambda g: g.number
)
faults = st.lists(
    st.builds(
        PersistentFault,
        texts,
        texts,
        instances,
        instances,
        naturals,
        times,
        times,
        naturals,
        texts,
        st.sampled_from(Cure),
        st.booleans(),
        texts,
        texts,
        st.sampled_from(Severity).map(int),
        st.lists(texts, max_size=3).map(tuple),
        st.lists(naturals, max_size=3).map(tuple),
        st.lists(times, max_size=3).map(tuple),
        naturals,
        times,
        st.sampled_from(Blame),
        st.booleans(),
        naturals,
        st.lists(naturals, max_size=3).map(tuple),
        monotonic_times,
        monotonic_times,
        monotonic_times,
        st.lists(monotonic_times, max_size=3).map(tuple),
    ),
    max_size=3,
    unique_by=lambda fault: (fault.uuid, fault.code, fault.gi, fault.ci),
)


@given(gpus, faults)
def test_any_fault_memory_survives_a_round_trip(gpus, faults):
    memory = PersistentState(tuple(gpus), tuple(faults))
    assert decode_gpu_faults(encode_gpu_faults(memory)) == memory


def test_fault_without_monotonic_times_is_stored_as_by_an_earlier_release():
    data = encode_gpu_faults(MEMORY)
    assert not [name for fault in json.loads(data)["faults"] for name in fault if name.endswith("_ns")]
    assert decode_gpu_faults(data) == MEMORY


ARRAYS_OF_0_1: Final = {
    "cpus": 2, "frequencies": 2, "memory": 2, "pools": 3, "pci": 5, "nics": 6, "nics.ports": 5, "gpus": 4,
}  # fmt: skip
"""Length of each array of values at start in release 0.1, which refuses a file with other lengths."""


def test_values_at_start_have_the_arrays_of_release_0_1():
    start = BootBaseline(
        FAULT.boot_id,
        (CpusBaseline(0, "0-3"),),
        "",
        1,
        (FrequencyBaseline(3_000_000, "0-3"),),
        (MemoryBaseline(0, 8),),
        (HugepagePoolBaseline("hugepages-2mi-node0", 8, 8),),
        (PciBaseline("0000:01:00.0", 5555, 4129, "mlx5_core", 16, repaired_ns=7),),
        (NicBaseline("", "mlx5_0", "mlx5_0", "", "", (NicPortBaseline(1, 1, True, 100, 4),)),),
        (GpuBaseline("GPU-1", 18, True, True),),
        (NumaCpusBaseline(0, "0-3"),),
    )
    memory = replace(MEMORY, start=start)
    data = encode_gpu_faults(memory)
    assert decode_gpu_faults(data) == memory
    found = json.loads(data)["start"]
    rows = {name: found[name] for name in ARRAYS_OF_0_1 if "." not in name} | {
        "nics.ports": found["nics"][0][5]
    }
    assert {name: {len(row) for row in of} for name, of in rows.items()} == {
        name: {length} for name, length in ARRAYS_OF_0_1.items()
    }


def test_field_of_later_release_is_ignored():
    assert decode_gpu_faults(changed_file(added_later=7)) == MEMORY


def storm(text: str, lines: int) -> PersistentState:
    """Return as many faults as are stored, each with as many texts and times as are kept."""
    wall_s = 1_790_000_000.125
    fault = FAULT._replace(
        evidence=text,
        advice="a" * 200,
        texts=(text,) * lines,
        pids=tuple(range(4_000_000, 4_000_000 + KEPT_BURSTS)),
        bursts_wall_s=(wall_s,) * KEPT_BURSTS,
        bursts_ns=(10**15 + 1,) * KEPT_BURSTS,
        first_ns=10**15 + 1,
        last_ns=10**15 + 1,
        healed_ns=10**15 + 1,
        healed_wall_s=wall_s,
        counters=(2**40,) * len(VOLATILE_COUNTERS),
    )
    codes = [f"gpu.xid.{number}" for number in range(100_000, 100_000 + KEPT_MAX)]
    faults = (fault._replace(code=code, last_wall_s=wall_s + at) for at, code in enumerate(codes))
    return PersistentState((GPU,), tuple(faults))


@pytest.mark.parametrize("lines", [KEPT_LINES, KEPT_SWITCHES])
@pytest.mark.parametrize("text", ["x" * 511, '"' * 511, (r"\x1b" * 128)[:511]])
def test_worst_storm_of_faults_fits_into_the_file(path, text, lines):
    memory = storm(text, lines)
    save_gpu_faults(path, memory)
    loaded, problem = load_gpu_faults(path)
    assert problem == ""
    assert [fault._replace(texts=()) for fault in loaded.faults] == [
        fault._replace(texts=()) for fault in memory.faults
    ]


def test_lines_of_resolved_mild_and_old_faults_are_left_out_first(path):
    memory = storm("x" * 511, 4)
    resolved, mild = memory.faults[-1]._replace(healed=True), memory.faults[-2]._replace(severity=2)
    memory = PersistentState((GPU,), (*memory.faults[:-2], mild, resolved))
    faults = decode_gpu_faults(encode_gpu_faults(memory)).faults
    lines_left = [bool(fault.texts) for fault in faults]
    assert lines_left[-2:] == [False, False]
    assert lines_left[:-2] == sorted(lines_left[:-2]), "older faults first"
    assert any(lines_left)
    assert len(encode_gpu_faults(memory)) > SIZE_MAX * 3 // 4


def test_first_start_has_no_faults_and_no_problem(path):
    assert load_gpu_faults(path) == (PersistentState(), "")
    assert not path.parent.exists()


def test_file_is_private(path):
    save_gpu_faults(path, MEMORY)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_partial_file_of_killed_agent_is_overwritten(path):
    write(path.with_name("gpu-faults.json.new"), b"{")
    path.with_name("gpu-faults.json.new").chmod(0o666)
    save_gpu_faults(path, MEMORY)
    assert load_gpu_faults(path)[0] == MEMORY
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["gpu-faults.json"]


# --- unusable files -----------------------------------------------------------------------------


def test_truncated_file_is_never_accepted():
    whole = encode_gpu_faults(MEMORY).rstrip()
    for size in range(len(whole)):
        with pytest.raises(UnusableFile, match="state file cannot be parsed: "):
            decode_gpu_faults(whole[:size])


@given(st.binary(max_size=200))
def test_random_bytes_give_memory_or_corrupt_file(data):
    with pytest.raises(UnusableFile):
        decode_gpu_faults(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "state file cannot be parsed: input data was truncated"),
        (b"[]", "state file cannot be parsed: expected `object`, got `array`"),
        (b"{}", "state file cannot be parsed: object missing required field `version`"),
        (b'{"version": 0, "gpus": [], "faults": []}', "state file has the unknown format version 0"),
        (
            b'{"version": 1, "gpus": []}',
            "state file cannot be parsed: object missing required field `faults`",
        ),
        (
            changed_file(severity=5),
            "state file cannot be parsed: expected `int` <= 4 - at `$.faults[0].severity`",
        ),
        (changed_file(gi=-1), "state file cannot be parsed: expected `int` >= 0 - at `$.faults[0].gi`"),
        (
            changed_file(ci=2**32),
            "state file cannot be parsed: expected `int` <= 4294967295 - at `$.faults[0].ci`",
        ),
        (
            changed_file(cure="prayer"),
            "state file cannot be parsed: invalid enum value 'prayer' - at `$.faults[0].cure`",
        ),
        (
            changed_file(times="2"),
            "state file cannot be parsed: expected `int`, got `str` - at `$.faults[0].times`",
        ),
        (
            changed_file(evidence=None),
            "state file cannot be parsed: expected `str`, got `null` - at `$.faults[0].evidence`",
        ),
        (encode_gpu_faults(PersistentState((GPU, GPU))), "GPU fault file has 2 GPUs with number 3"),
        (b"\xff\xfe{}", "state file cannot be parsed: "),
        (b" " * (SIZE_MAX + 1), "file is 1048577 bytes, limit 1048576"),
    ],
)
def test_corrupt_file_is_set_aside_with_reason(path, data, reason):
    write(path, data)
    memory, problem = load_gpu_faults(path)
    assert memory == PersistentState()
    assert problem.startswith(f"{path}: {reason}")
    assert problem.endswith("; renamed to gpu-faults.json.corrupt-1")
    assert path.with_name("gpu-faults.json.corrupt-1").read_bytes() == data
    assert load_gpu_faults(path) == (PersistentState(), "")


def test_field_of_a_later_release_is_ignored():
    document = json.loads(encode_gpu_faults(MEMORY))
    document["later"] = document["faults"][0]["later"] = document["gpus"][0]["later"] = [1]
    assert decode_gpu_faults(json.dumps(document).encode()) == MEMORY


def test_file_of_later_version_is_set_aside_as_newer(path):
    write(path, b'{"version": 2, "devices": {}}')
    words = f"{path}: state file has format version 2, this agent reads up to 1; update the agent; renamed to gpu-faults.json.newer-1"  # noqa: E501
    assert load_gpu_faults(path) == (PersistentState(), words)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_directory_or_fifo_at_path_is_set_aside(path, make):
    path.parent.mkdir()
    make(path)
    assert load_gpu_faults(path)[1].endswith("; renamed to gpu-faults.json.corrupt-1")
    save_gpu_faults(path, MEMORY)
    assert load_gpu_faults(path)[0] == MEMORY


def failing_reads(monkeypatch, number, times):
    """Let the first reads of state files fail with an error number."""
    failures = iter([number] * times)

    def read(path, limit, **options):
        if found := next(failures, 0):
            raise ReadError(path, os.strerror(found), errno=found)
        return read_bounded(path, limit, **options)

    monkeypatch.setattr("agent.store.state_files.read_bounded", read)
    monkeypatch.setattr("agent.store.state_files.READ_PAUSE_S", 0.0)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_file_is_read_again_after_a_passing_error(path, monkeypatch, number):
    save_gpu_faults(path, MEMORY)
    failing_reads(monkeypatch, number, READ_ATTEMPTS - 1)
    assert load_gpu_faults(path) == (MEMORY, "")
    assert os.listdir(path.parent) == [path.name]


def test_file_that_cannot_be_read_stays_and_is_kept_by_later_writes(path, monkeypatch):
    save_gpu_faults(path, MEMORY)
    failing_reads(monkeypatch, errno.ENFILE, READ_ATTEMPTS)
    memory, problem = load_gpu_faults(path)
    assert memory == PersistentState()
    assert problem.endswith("in system; left in place, and kept as gpu-faults.json.unreadable-1")
    assert load_gpu_faults(path) == (MEMORY, "")
    save_gpu_faults(path, PersistentState())
    assert load_gpu_faults(path.with_name("gpu-faults.json.unreadable-1")) == (MEMORY, "")


def test_five_corrupt_files_are_kept_and_the_oldest_is_replaced(path):
    for number in range(1, 6):
        write(path, b"broken %d" % number)
        assert load_gpu_faults(path)[1].endswith(f"corrupt-{number}")
        os.utime(
            path.with_name(f"gpu-faults.json.corrupt-{number}"), (0, (number - 3) % 5)
        )  # the 3rd is oldest
    write(path, b"broken 6")
    assert load_gpu_faults(path)[1].endswith("corrupt-3")
    assert path.with_name("gpu-faults.json.corrupt-3").read_bytes() == b"broken 6"
    assert len(os.listdir(path.parent)) == 5


# --- unwritable places -------------------------------------------------------------------------


@pytest.fixture
def forbidden_path(path: Path):
    """Path in a directory that this user may not access, even if root runs the tests."""
    save_gpu_faults(path, MEMORY)
    path.parent.chmod(0)
    before = os.geteuid()
    if before == 0:
        become_other_user()
    yield path
    os.seteuid(before)
    path.parent.chmod(0o700)
    assert load_gpu_faults(path) == (MEMORY, "")


def test_unwritable_directory_is_named_and_old_file_stays(forbidden_path):
    with pytest.raises(StateWriteError, match=r"could not be written: Permission denied") as caught:
        save_gpu_faults(forbidden_path, PersistentState())
    assert (caught.value.path, caught.value.errno) == (forbidden_path, errno.EACCES)
    assert caught.value.size == len(encode_gpu_faults(PersistentState()))


def test_unreadable_file_stays_in_place(forbidden_path):
    reason = "Permission denied; could not be kept: Permission denied; the next write replaces it"
    words = f"{forbidden_path}: {reason}"
    assert load_gpu_faults(forbidden_path) == (PersistentState(), words)


def test_file_in_place_of_directory_is_named(tmp_path):
    (tmp_path / "state").write_text("")
    with pytest.raises(StateWriteError, match="could not be written: ") as caught:
        save_gpu_faults(tmp_path / "state" / "gpu-faults.json", MEMORY)
    assert caught.value.errno in {errno.ENOTDIR, errno.EEXIST}


def test_oversized_memory_is_refused_before_writing(path):
    save_gpu_faults(path, MEMORY)
    long = FAULT._replace(evidence="x" * SIZE_MAX)
    with pytest.raises(
        StateWriteError,
        match=r"10[0-9]{5} bytes could not be written: the content is over the limit of 1048576",
    ):
        save_gpu_faults(path, PersistentState(faults=(long,)))
    assert load_gpu_faults(path) == (MEMORY, "")


FULL_DISK = """
import errno, os, sys
from pathlib import Path
from agent.model.persistent_faults import PersistentState
from agent.store.gpu_fault_file import load_gpu_faults as load, save_gpu_faults as save
from agent.store.state_files import StateWriteError
sys.path.insert(0, {tests!r})
from test_fault_store import FAULT, MEMORY
path = Path({directory!r}, "gpu-faults.json")
save(path, MEMORY)
large = PersistentState(faults=(FAULT._replace(texts=("x" * 200_000,)),))
try:
    save(path, large)
except StateWriteError as error:
    assert error.errno == errno.ENOSPC, error
    print(error)
assert load(path) == (MEMORY, "")
assert os.listdir(path.parent) == ["gpu-faults.json"]
os.system("mount -o remount,ro {directory}")
try:
    save(path, MEMORY)
except StateWriteError as error:
    assert error.errno == errno.EROFS, error
    print(error)
assert load(path) == (MEMORY, "")
"""


def test_full_and_read_only_disks_are_named_and_old_file_stays(tmp_path):
    program = FULL_DISK.format(tests=str(Path(__file__).parent), directory=str(tmp_path))
    full, read_only = run_on_small_disk(program, tmp_path)
    assert full.endswith("bytes could not be written: No space left on device")
    assert read_only.endswith("bytes could not be written: Read-only file system")


SAVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from agent.model.persistent_faults import PersistentState
from agent.store.gpu_fault_file import save_gpu_faults as save
from test_fault_store import FAULT, MEMORY
other = PersistentState(faults=(FAULT._replace(texts=("x" * 50_000,)),))
save(Path({path!r}), MEMORY)
print("saving", flush=True)
while True:
    save(Path({path!r}), other)
    save(Path({path!r}), MEMORY)
"""


@pytest.mark.parametrize("delay_ms", [0, 1, 3, 7, 13])
def test_agent_killed_during_save_leaves_a_complete_file(path, delay_ms):
    program = SAVER.format(tests=str(Path(__file__).parent), path=str(path))
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE) as saver:
        assert saver.stdout.readline() == b"saving\n"
        time.sleep(delay_ms / 1000)  # kills at any point of a save
        saver.send_signal(signal.SIGKILL)
    memory, problem = load_gpu_faults(path)
    assert problem == ""
    assert memory in (MEMORY, PersistentState(faults=(FAULT._replace(texts=("x" * 50_000,)),)))
    save_gpu_faults(path, MEMORY)
    assert load_gpu_faults(path) == (MEMORY, "")


def test_records_of_cleared_faults_are_stored_and_optional() -> None:
    record = ClearedFault("gpu-3", "gpu.xid.79", 1_790_000_100.5, 0, 4711, 1000)
    memory = PersistentState(MEMORY.gpus, MEMORY.faults, (record,))
    assert decode_gpu_faults(encode_gpu_faults(memory)) == memory
    assert "cleared" not in json.loads(encode_gpu_faults(MEMORY)), "older agents read the file"


def test_file_has_only_keys_that_release_0_1_accepts() -> None:
    """It refuses unknown keys of the file and of a fault, and ignores those of ``start``."""
    fault = FAULT._replace(first_ns=1, last_ns=2, healed_ns=3, bursts_ns=(1,))
    of_check = PersistentCondition(
        "a/b/dev-0", "firmware", "fw.stuck", Severity.UNHEALTHY, "stuck", "", None, None, 1, 1.0
    )
    of_gpu = of_check._replace(device="gpu-0", check="", code="gpu.lost", ended_ns=5)
    memory = replace(MEMORY, faults=(fault,), runs=1, conditions=(of_check, of_gpu))
    data = encode_gpu_faults(memory)
    written = json.loads(data)
    released = json.loads((RELEASE / "gpu-faults.json").read_bytes())
    assert written.keys() <= {*released, "cleared", "start", "checks", "runs"}
    assert written["faults"][0].keys() == released["faults"][0].keys()
    assert [len(check) for check in written["checks"]] == [10], "it refuses longer lists"
    assert decode_gpu_faults(data) == memory

"""State file of prepares: round trip, two instances, and disks that refuse writes."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from other_user import become_other_user
from prepare_samples import DRIVER, NOW, claim, ref, verdict
from small_disk import run_on_small_disk

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.health import Effect, Health, Repair
from agent.model.prepare import DriverFault, ErrorClass, FaultTaint, LastPrepareResult, PrepareVerdict, Scope
from agent.prepare import prepare_ledger as ledgers
from agent.prepare.prepare_ledger import DriverFaults, LedgerEntry, PrepareLedger
from agent.store.driver_files import (
    LEDGER_FILE,
    SIZE_MAX,
    LedgerFileContent,
    decode_ledger,
    encode_ledger,
    load_ledger,
    save_ledger,
)
from agent.store.state_files import StateWriteError, UnusableFile
from agent.system.files import ReadError

ROOT = Path(__file__).parent.parent
STUCK = verdict(ErrorClass.FAILED_DEVICE, "fpga.stuck")
FULL, _ = ledgers.with_failure(
    ledgers.with_success(PrepareLedger(), claim("b"), "healthy", NOW, "1"),
    claim("a"),
    "healthy",
    STUCK,
    NOW,
    "1",
)


def ledger_with(name: str, at: float = NOW) -> PrepareLedger:
    """Return a ledger with one prepared claim."""
    return ledgers.with_success(PrepareLedger(), claim(name), "healthy", at, "1")


def keep(directory: Path, ledger: PrepareLedger = FULL) -> PrepareLedger:
    return save_ledger(directory, DRIVER, "1", ledger, NOW)[0]


texts = st.text(st.characters(codec="utf-8"), max_size=8)
times = st.floats(0, 253_402_300_799)
claims = st.builds(ClaimRef, texts, texts, texts)
devices = st.lists(st.builds(DeviceRef, texts, texts, texts), max_size=3).map(tuple)
some = st.lists(texts, max_size=2).map(tuple)
verdicts = st.builds(
    PrepareVerdict,
    st.sampled_from(ErrorClass),
    texts,
    st.sampled_from(Scope),
    claims,
    texts,
    some,
    devices,
    texts,
    some,
    st.floats(0, 1),
    texts,
    st.none() | times,
    st.integers(0, 86_400),
    st.none() | st.sampled_from(Health),
    st.none() | st.builds(FaultTaint, st.sampled_from(Effect), texts),
    times,
    times,
    st.integers(1, 2**40),
    st.sampled_from(Repair),
)


@st.composite
def kept_claims(draw) -> LedgerEntry:
    which = draw(claims)
    verdict = draw(st.none() | verdicts)
    verdict = verdict and replace(verdict, claim=which)
    outcome = LastPrepareResult(which, draw(texts), draw(texts), draw(devices), draw(times), verdict)
    return LedgerEntry(outcome, draw(texts), draw(times))


faults = st.builds(
    DriverFault,
    st.integers(1, 99),
    st.builds(DeviceRef, texts, texts, texts),
    texts,
    texts,
    texts,
    times,
    claims,
    times,
    st.sampled_from([Health.UNKNOWN, Health.UNHEALTHY]),
    st.booleans(),
    st.sampled_from(Repair),
)


@given(
    st.lists(kept_claims(), max_size=4),
    st.lists(faults, max_size=4, unique_by=lambda fault: fault.number),
    texts,
    texts,
)
def test_any_ledger_survives_a_round_trip(entries, reported, driver, version):
    ledger = PrepareLedger(
        {entry.outcome.claim.uid: entry for entry in entries}, DriverFaults(tuple(reported), 100)
    )
    found = decode_ledger(encode_ledger(LedgerFileContent(driver, version, ledger)))
    assert found == LedgerFileContent(driver, version, ledger)


def test_ledger_of_a_version_without_repairs_is_loaded():
    data = encode_ledger(LedgerFileContent(DRIVER, "1", FULL))
    assert b"repair" not in data
    (entry,) = (claim for claim in decode_ledger(data).ledger.claims.values() if claim.outcome.verdict)
    assert entry.outcome.verdict.repair is Repair.NONE


def test_saved_ledger_is_loaded(tmp_path):
    assert keep(tmp_path / "state") == FULL
    assert load_ledger(tmp_path / "state", DRIVER) == (FULL, "")
    content = decode_ledger((tmp_path / "state" / LEDGER_FILE).read_bytes())
    assert content == LedgerFileContent(DRIVER, "1", FULL)


def test_first_start_has_empty_ledger_and_creates_nothing(tmp_path):
    assert load_ledger(tmp_path / "state", DRIVER) == (PrepareLedger(), "")
    assert not (tmp_path / "state").exists()


def test_file_is_private(tmp_path):
    keep(tmp_path / "state")
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "state").iterdir()} == {0o600}


def test_text_invalid_in_utf_8_does_not_prevent_the_save(tmp_path):
    odd = replace(STUCK, summary="bank \ud800", claim=ClaimRef("team", "x", "uid-a"))
    ledger, _ = ledgers.with_failure(PrepareLedger(), claim("a"), "", odd, NOW)
    assert keep(tmp_path, ledger).claims["uid-a"].outcome.verdict.summary == "bank \ud800"
    assert load_ledger(tmp_path, DRIVER)[0].claims["uid-a"].outcome.verdict.summary == "bank ?"


def test_oversized_ledger_drops_its_oldest_claims():
    long = replace(verdict(), detail="x" * 2000, evidence=("y" * 2000,) * 4)
    ledger = PrepareLedger()
    for number in range(600):
        ledger, _ = ledgers.with_failure(ledger, claim(f"{number:03}"), "", long, NOW + number)
    data = encode_ledger(LedgerFileContent(DRIVER, "1", ledger))
    left = decode_ledger(data).ledger.claims
    assert SIZE_MAX // 2 < len(data) <= SIZE_MAX
    assert set(left) == {f"uid-{number:03}" for number in range(600 - len(left), 600)}


# --- unusable files -----------------------------------------------------------------------------


def changed_ledger(**top: object) -> bytes:
    return json.dumps(json.loads(encode_ledger(LedgerFileContent(DRIVER, "1", FULL))) | top).encode()


def with_first(key: str, **fields: object) -> bytes:
    document = json.loads(encode_ledger(LedgerFileContent(DRIVER, "1", FULL)))
    document[key][0] |= fields
    return json.dumps(document).encode()


@pytest.mark.parametrize("key", ["outcomes", "told"])
def test_field_of_a_later_release_is_ignored(key: str) -> None:
    known = decode_ledger(encode_ledger(LedgerFileContent(DRIVER, "1", FULL)))
    assert decode_ledger(changed_ledger(later=1)) == known
    assert decode_ledger(with_first(key, later=[1])) == known


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "state file cannot be parsed: input data was truncated"),
        (b"[]", "state file cannot be parsed: expected `object`, got `array`"),
        (b'{"version": 1}', "state file cannot be parsed: object missing required field `driver`"),
        (changed_ledger(version=0), "state file has the unknown format version 0"),
        (
            changed_ledger(driver="cpu.example.com"),
            "prepare ledger belongs to driver 'cpu.example.com', not to 'gpu.example.com'",
        ),
        (
            changed_ledger(next_number=1),
            "prepare ledger has 1 driver faults with the numbers [1]: not unique, or not below the next "
            "number 1",
        ),
        (
            changed_ledger(
                outcomes=[json.loads(encode_ledger(LedgerFileContent(DRIVER, "1", FULL)))["outcomes"][0]] * 2
            ),
            "prepare ledger has 2 results of only 1 different claims",
        ),
        (
            with_first("told", number=0),
            "state file cannot be parsed: expected `int` >= 1 - at `$.told[0].number`",  # verbatim
        ),
        (
            with_first("outcomes", at_wall_s=-1),
            "state file cannot be parsed: expected `float` >= 0.0 - at `$.outcomes[0].at_wall_s`",
        ),
        (
            with_first("outcomes", at_wall_s=1e308),
            "state file cannot be parsed: expected `float` <= 253402300799.0 - at `$.outcomes[0].at_wall_s`",
        ),
        (
            with_first("outcomes", verdict={"error_class": "prayer"}),
            "state file cannot be parsed: invalid enum value 'prayer' - at "
            "`$.outcomes[0].verdict.error_class`",
        ),
        (b" " * (SIZE_MAX + 1), "file is 4194305 bytes, limit 4194304"),
    ],
)
def test_corrupt_file_is_set_aside_with_reason(tmp_path, data, reason):
    path = tmp_path / LEDGER_FILE
    path.write_bytes(data)
    ledger, problem = load_ledger(tmp_path, DRIVER)
    assert ledger == PrepareLedger()
    assert problem.startswith(f"{path}: {reason}")
    assert problem.endswith("; renamed to prepares.json.corrupt-1")
    assert (tmp_path / "prepares.json.corrupt-1").read_bytes() == data


def test_file_of_later_version_is_set_aside_as_newer(tmp_path):
    (tmp_path / LEDGER_FILE).write_bytes(changed_ledger(version=2))
    assert load_ledger(tmp_path, DRIVER)[1].endswith("; renamed to prepares.json.newer-1")


def test_truncated_file_is_never_accepted():
    whole = encode_ledger(LedgerFileContent(DRIVER, "1", FULL)).rstrip()
    for size in range(len(whole)):
        with pytest.raises(UnusableFile, match="state file cannot be parsed: "):
            decode_ledger(whole[:size])


@given(st.binary(max_size=200))
def test_random_bytes_give_ledger_or_corrupt_file(data):
    with pytest.raises(UnusableFile):
        decode_ledger(data)


def test_corrupt_file_is_set_aside_by_next_save(tmp_path):
    (tmp_path / LEDGER_FILE).write_bytes(b"{")
    ledger, problem = save_ledger(tmp_path, DRIVER, "1", FULL, NOW)
    assert (ledger, load_ledger(tmp_path, DRIVER)) == (FULL, (FULL, ""))
    assert problem.endswith("; renamed to prepares.json.corrupt-1")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_ledger_that_cannot_be_read_is_not_replaced_by_a_save(tmp_path, monkeypatch, number):
    keep(tmp_path, FULL)
    before = (tmp_path / LEDGER_FILE).read_bytes()

    def read(path, limit, **options):
        raise ReadError(path, os.strerror(number), errno=number)

    with monkeypatch.context() as patch:
        patch.setattr("agent.store.state_files.read_bounded", read)
        with pytest.raises(StateWriteError, match=os.strerror(number)) as caught:
            keep(tmp_path, ledger_with("a"))
    assert caught.value.errno == number
    assert (tmp_path / LEDGER_FILE).read_bytes() == before
    assert not list(tmp_path.glob("prepares.json.*"))


# --- two instances -----------------------------------------------------------------------------------------


def test_entries_of_another_instance_are_merged(tmp_path):
    keep(tmp_path, ledger_with("a"))
    assert set(keep(tmp_path, ledger_with("b")).claims) == {"uid-a", "uid-b"}
    assert set(load_ledger(tmp_path, DRIVER)[0].claims) == {"uid-a", "uid-b"}


SAVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from prepare_samples import DRIVER, NOW, verdict
from agent.model.prepare import ErrorClass
from agent.prepare import prepare_ledger as ledgers
from agent.prepare.prepare_ledger import PrepareLedger
from agent.store.driver_files import save_ledger as save
from prepare_samples import claim
name, directory, times = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
ledger = PrepareLedger()
print("saving", flush=True)
number = 0
while number < times or not times:
    failure = verdict(ErrorClass.FAILED_DEVICE, f"fpga.{{name}}{{number % 20}}")
    mine = claim(f"{{name}}{{number % 20}}", f"dev-{{name}}{{number % 20}}")
    ledger, _ = ledgers.with_failure(ledger, mine, "", failure, NOW + number, "1")
    ledger, _ = save(directory, DRIVER, "1", ledger, NOW + number)
    number += 1
"""


def saver(name: str, directory: Path, times: int) -> subprocess.Popen[str]:
    program = SAVER.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", program, name, str(directory), str(times)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_concurrent_saves_lose_nothing_and_share_no_fault_number(tmp_path):
    with saver("x", tmp_path, 20) as first, saver("y", tmp_path, 20) as second:
        assert (first.wait(), second.wait()) == (0, 0)
    ledger, problem = load_ledger(tmp_path, DRIVER)
    assert problem == ""
    assert set(ledger.claims) == {f"uid-{name}{number}" for name in "xy" for number in range(20)}
    assert len(ledger.driver_faults.faults) == 40
    assert len({fault.number for fault in ledger.driver_faults.faults}) == 40


@pytest.mark.parametrize("delay_ms", [0, 1, 3, 7])
def test_instance_killed_during_save_leaves_complete_file_and_no_lock(tmp_path, delay_ms):
    keep(tmp_path)
    with saver("x", tmp_path, 0) as writer:
        assert writer.stdout.readline() == "saving\n"
        time.sleep(delay_ms / 1000)  # kills at any point of a write
        writer.send_signal(signal.SIGKILL)
    ledger, problem = load_ledger(tmp_path, DRIVER)
    assert problem == ""
    assert set(FULL.claims) <= set(ledger.claims)
    assert set(FULL.claims) <= set(keep(tmp_path).claims)
    assert sorted(os.listdir(tmp_path)) == [LEDGER_FILE, "prepares.lock"]


# --- unwritable places -------------------------------------------------------------------------


@pytest.fixture
def forbidden_directory(tmp_path: Path):
    """Directory that this user may not access, even if root runs the tests."""
    directory = tmp_path / "state"
    keep(directory)
    directory.chmod(0)
    before = os.geteuid()
    if before == 0:
        become_other_user()
    yield directory
    os.seteuid(before)
    directory.chmod(0o700)
    assert load_ledger(directory, DRIVER) == (FULL, "")


def test_unwritable_directory_is_named_and_file_stays(forbidden_directory):
    with pytest.raises(StateWriteError, match="could not be written: Permission denied") as caught:
        keep(forbidden_directory, ledger_with("c"))
    assert (caught.value.path, caught.value.errno) == (forbidden_directory / LEDGER_FILE, errno.EACCES)


def test_file_in_place_of_directory_is_named(tmp_path):
    (tmp_path / "state").write_text("")
    with pytest.raises(StateWriteError, match="could not be written: "):
        keep(tmp_path / "state")


FULL_DISK = """
import errno, os, sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_prepare_store import DRIVER, FULL, NOW, claim, keep, verdict
from agent.prepare import prepare_ledger as ledgers
from agent.store.state_files import StateWriteError
from agent.store.driver_files import load_ledger as load
directory = Path({directory!r}, "state")
keep(directory)
large = replace(verdict(), detail="x" * 2000, evidence=("y" * 2000,) * 16)
ledger = FULL
for number in range(10):
    ledger, _ = ledgers.with_failure(ledger, claim(str(number)), "", large, NOW)
try:
    keep(directory, ledger)
except StateWriteError as error:
    assert error.errno == errno.ENOSPC, error
    print(error)
assert load(directory, DRIVER) == (FULL, "")
assert sorted(os.listdir(directory)) == ["prepares.json", "prepares.lock"]
os.system("mount -o remount,ro {directory}")
try:
    keep(directory)
except StateWriteError as error:
    assert error.errno == errno.EROFS, error
    print(error)
assert load(directory, DRIVER) == (FULL, "")
"""


def test_full_and_read_only_disks_are_named_and_file_stays(tmp_path):
    program = FULL_DISK.format(tests=str(Path(__file__).parent), directory=str(tmp_path))
    full, read_only = run_on_small_disk(program, tmp_path)
    assert full.endswith("could not be written: No space left on device")
    assert read_only.endswith("could not be written: Read-only file system")


def test_fault_numbers_continue_over_restarts(tmp_path):
    keep(tmp_path)
    ledger, _ = load_ledger(tmp_path, DRIVER)
    ledger, _ = ledgers.with_failure(
        ledger, claim("c", "gpu-7"), "", replace(STUCK, devices=(ref("gpu-7"),)), NOW, "1"
    )
    assert [fault.number for fault in ledger.driver_faults.faults] == [1, 2]

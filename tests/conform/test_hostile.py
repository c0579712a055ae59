"""Hostile servers: conform ends in time with a result, and sends no control character to a terminal."""

import json
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import pytest
from agents import short_tmp
from other_user import become_other_user

from agent.cli.main import main
from conform.frames import Behaviour, FrameServer
from conform.hostile import BEHAVIOURS
from conform.lists import ListedDevice, health_list
from conform.running import ConformRun, Runs, concurrent_runs, conform, conform_driver, conform_socket
from conform.servers import Driver, DriverInfo, RefusedCall, Stream

__all__ = ["short_tmp"]

pytestmark = pytest.mark.timeout(1800)  # a repeated run waits for the others
RESULTS: Final = {"pass", "warn", "fail", "not run", "skipped"}
CONTROL_TEXT: Final = "\x1b[2J\x1b]0;owned\x07\r\n\x9b31m\u202e\x00"


def is_clean(text: str) -> bool:
    """Return whether the text has no control character, colour or change of direction."""
    return text.replace("\n", "").isprintable()


def assert_orderly(run: ConformRun) -> None:
    """Check that a run ended by itself, with a limited amount of text."""
    assert run.code in {0, 1, 2, 3, 69}, run.errors
    assert "Traceback" not in run.errors
    for text in (run.output, run.errors):
        assert is_clean(text)
        assert len(text) < 1 << 18
    if run.code == 69:
        assert run.errors.startswith("drahealth: ")
    else:
        assert {check["result"] for check in run.document["results"]} <= RESULTS


# --- servers at the level of frames -------------------------------------------------------------------------


def _run_behaviour(behaviour: Behaviour) -> ConformRun:
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory:
        path = Path(directory) / "dra.sock"
        with FrameServer(path, behaviour):
            return conform_socket(path)


# --- drivers that send too much -----------------------------------------------------------------------------


class SendsWithoutPause(Driver):
    heartbeat_s = 0.0


class HasManyDevices(Driver):
    heartbeat_s = 1.0

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(b"gpu-%d" % number, message=b"x" * 100) for number in range(20_000)]


class HasNewDevicesEveryTime(Driver):
    heartbeat_s = 0.1

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(b"gpu-%d-%d" % (lists, number)) for number in range(1000)]


class WritesOnTheTerminal(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        control_text = CONTROL_TEXT.encode()
        return [
            ListedDevice(control_text, control_text, message=control_text * 50, lease_s=-1),
            ListedDevice(b"\xff\x1b[2J"),
        ]

    def info(self) -> DriverInfo:
        control_text = f"/{CONTROL_TEXT.replace(chr(0), '')}"
        return DriverInfo(CONTROL_TEXT, CONTROL_TEXT, control_text, [*self.services, CONTROL_TEXT])

    def prepare(self, version: str) -> None:
        raise RefusedCall(grpc.StatusCode.INTERNAL, CONTROL_TEXT.replace("\x00", ""))


class AdvertisesManyServices(Driver):
    def info(self) -> DriverInfo:
        return super().info()._replace(services=["v1.DRAPlugin", *("x" * 1000 for _ in range(1000))])


class SendsRandomLists(Driver):
    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        rng = random.Random(4)
        good = health_list(self.devices(stream, 0))
        for _ in range(300):
            offset = rng.randrange(len(good))
            yield rng.choice(
                [
                    rng.randbytes(rng.randrange(100)),
                    good[:offset],
                    good[:offset] + rng.randbytes(1) + good[offset + 1 :],
                    good[:offset] + rng.randbytes(5) + good[offset:],
                ]
            )
        stream.wait_closed()


EXCESSIVE: Final = {
    driver.__name__: driver
    for driver in (
        SendsWithoutPause,
        HasManyDevices,
        HasNewDevicesEveryTime,
        WritesOnTheTerminal,
        AdvertisesManyServices,
        SendsRandomLists,
    )
}


def _run_driver(driver: type[Driver]) -> ConformRun:
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        driver(Path(directory)) as excessive,
    ):
        return conform_driver(excessive, "--socket", excessive.service, for_s=2)


# --- results ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    work = {name: partial(_run_behaviour, behaviour) for name, behaviour in BEHAVIOURS.items()}
    with concurrent_runs(
        request, work | {name: partial(_run_driver, driver) for name, driver in EXCESSIVE.items()}
    ) as runs:
        yield runs


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_hostile_server_does_not_crash_or_hang_conform(runs: Runs, name: str) -> None:
    run = runs[name].result()
    assert_orderly(run)
    assert run.code in {1, 2, 69}, "never a good driver"


@pytest.mark.parametrize("name", EXCESSIVE)
def test_excessive_driver_does_not_crash_conform_or_flood_output(runs: Runs, name: str) -> None:
    assert_orderly(runs[name].result())


def test_table_output_has_no_control_characters(short_tmp: Path) -> None:
    with WritesOnTheTerminal(short_tmp) as driver:
        flags = ("--plugin-dir", driver.registry, "--kubelet-dir", driver.root, "--socket", driver.service)
        run = conform(*flags, "--for", "2s", output="table")
    assert run.code == 2
    assert is_clean(run.output)


# --- missing servers ----------------------------------------------------------------------------------------


def assert_unreachable(run: ConformRun, *texts: str) -> None:
    """Check exit code 69 and one line that contains these texts."""
    assert run.code == 69, run.errors
    assert run.output == ""
    [line] = run.errors.splitlines()
    for text in texts:
        assert text in line


def test_missing_socket_exits_69(short_tmp: Path) -> None:
    assert_unreachable(conform_socket(short_tmp / "dra.sock"), f"{short_tmp}/dra.sock")


def test_socket_without_server_exits_69(short_tmp: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(short_tmp / "dra.sock"))
    assert_unreachable(conform_socket(short_tmp / "dra.sock"), f"{short_tmp}/dra.sock")


def test_other_file_types_exit_69(short_tmp: Path) -> None:
    (short_tmp / "file").touch()
    os.mkfifo(short_tmp / "fifo")
    for path in (short_tmp / "file", short_tmp / "fifo", short_tmp):
        assert_unreachable(conform_socket(path), f"{path}: is not a socket")


@pytest.fixture
def drop_root() -> Iterator[None]:
    """Drop root for a test."""
    assert main(["conform", "--socket", "/nowhere"]) == 69  # imports modules before the loss of permissions
    before = os.geteuid()
    if before == 0:
        become_other_user()
    yield
    os.seteuid(before)


@pytest.fixture
def forbidden_socket(short_tmp: Path) -> Iterator[Path]:
    """Yield a service socket that only its owner may open, in a directory that all may read."""
    short_tmp.chmod(0o755)
    with Driver(short_tmp) as driver:
        driver.service.chmod(0)
        yield driver.service


def test_socket_without_permission_exits_77(
    forbidden_socket: Path, drop_root: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["conform", "--socket", str(forbidden_socket), "--for", "2s"])
    run = capsys.readouterr()
    assert (code, run.out) == (77, "")
    assert str(forbidden_socket) in run.err


# --- directories of registration sockets --------------------------------------------------------------------


def conform_directory(directory: Path, *flags: object) -> ConformRun:
    """Run conform against a directory."""
    return conform("--plugin-dir", directory, "--kubelet-dir", directory.parent, "--for", "2s", *flags)


def test_missing_directory_exits_64(short_tmp: Path) -> None:
    (short_tmp / "file").touch()
    for name in ("plugins_registry", "file"):
        run = conform_directory(short_tmp / name)
        assert (run.code, run.output) == (64, "")
        assert f"{short_tmp}/{name}" in run.errors


def test_empty_directory_exits_69(short_tmp: Path) -> None:
    assert_unreachable(conform_directory(short_tmp), f"{short_tmp}: no registration socket")


def test_file_among_the_sockets_is_reported(short_tmp: Path) -> None:
    with Driver(short_tmp) as driver:
        (driver.registry / f"{driver.name}-old-reg.sock").write_text("")
        run = conform_driver(driver, for_s=2)
    assert f"{driver.name}-old-reg.sock" in run.observation("registration.socket")
    assert run.results["registration.socket"] in {"warn", "fail"}


def test_stale_registration_socket_does_not_prevent_checks(short_tmp: Path) -> None:
    with Driver(short_tmp) as driver, socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(driver.registry / f"{driver.name}-old-reg.sock"))
        stale.close()
        run = conform_driver(driver, for_s=2)
    assert_orderly(run)
    assert run.results["health.first_list"] in {"pass", "warn"}, "a warning is that of a busy machine"


def test_several_drivers_require_the_driver_flag(short_tmp: Path) -> None:
    class Other(Driver):
        name = "nic.example.com"

    with Driver(short_tmp) as driver, Other(short_tmp) as other:
        run = conform_driver(driver, for_s=2)
        assert (run.code, run.output) == (64, "")
        assert driver.name in run.errors
        assert other.name in run.errors
        chosen = conform_driver(driver, "--driver", other.name, for_s=2)
        assert str(other.service) in json.dumps(chosen.document)
        assert str(driver.service) not in json.dumps(chosen.document)
        missing = conform_driver(driver, "--driver", "tpu.example.com", for_s=2)
        assert missing.code == 64
        assert "tpu.example.com" in missing.errors


def test_several_plugins_of_another_type_are_not_notified(short_tmp: Path) -> None:
    notified = []

    class Disk(Driver):
        name = "disk.example.com"

        def info(self) -> DriverInfo:
            return super().info()._replace(kind="CSIPlugin")

        def notify(self, status: bytes) -> None:
            notified.append(self.name)

    class Tape(Disk):
        name = "tape.example.com"

    with Disk(short_tmp) as driver, Tape(short_tmp):
        run = conform_driver(driver, "--refuse", for_s=2)
    assert (run.code, run.output, notified) == (64, "", [])
    assert "no DRA driver, choose a plugin with --driver: 'disk.example.com' (CSIPlugin), 'tape" in run.errors


class RemovesItsDirectory(Driver):
    """Driver that removes its directory during the session."""

    def prepare(self, version: str) -> None:
        shutil.rmtree(self.root / "plugins_registry", ignore_errors=True)


def test_directory_removed_during_session_is_no_crash(short_tmp: Path) -> None:
    with RemovesItsDirectory(short_tmp) as driver:
        assert_orderly(conform_driver(driver, for_s=2))


# --- usage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--socket", "/x", "--for", "1s"),
        ("--socket", "/x", "--for", "11m"),
        ("--socket", "/x", "--for", "soon"),
        ("--socket", "/x", "--driver", "a.example.com"),
        ("--refuse",),
        ("--socket", "/x", "--no-notify"),
        ("--plugin-dir", "/x", "--refuse", "--no-notify"),
    ],
)
def test_invalid_flags_exit_64(flags: tuple[str, ...]) -> None:
    run = conform(*flags)
    assert (run.code, run.output) == (64, "")
    assert "Traceback" not in run.errors

"""Whatever a peer does, conform ends in time and says what it saw, and nothing reaches a terminal raw."""

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

from agent.cli.main import main
from conform.frames import FrameServer, Manners
from conform.hostile import MANNERS
from conform.lists import Told, health_list
from conform.running import Runs, Said, at_once, conform, conform_driver, conform_socket
from conform.servers import Driver, Info, Refused, Stream

__all__ = ["short_tmp"]

RESULTS: Final = {"pass", "warn", "fail", "not run"}
NASTY: Final = "\x1b[2J\x1b]0;owned\x07\r\n\x9b31m\u202e\x00"
NOBODY: Final = 65534


def clean(text: str) -> bool:
    """Nothing in it moves a cursor, sets a colour or turns the reading direction."""
    return text.replace("\n", "").isprintable()


def decent(said: Said) -> None:
    """It came to an end of its own, and wrote text of a size that can be read."""
    assert said.code in {0, 1, 2, 3, 69}, said.errors
    assert "Traceback" not in said.errors
    for text in (said.output, said.errors):
        assert clean(text)
        assert len(text) < 1 << 18
    if said.code == 69:
        assert said.errors.startswith("drahealth: ")
    else:
        assert {check["result"] for check in said.document["results"]} <= RESULTS


# --- servers at the level of frames -------------------------------------------------------------------------


def _meet(manners: Manners) -> Said:
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory:
        path = Path(directory) / "dra.sock"
        with FrameServer(path, manners):
            return conform_socket(path)


# --- drivers that overdo it ---------------------------------------------------------------------------------


class SpeaksWithoutPause(Driver):
    heartbeat_s = 0.0


class HasManyDevices(Driver):
    heartbeat_s = 1.0

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return [Told(b"gpu-%d" % number, message=b"x" * 100) for number in range(20_000)]


class HasNewDevicesEveryTime(Driver):
    heartbeat_s = 0.1

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return [Told(b"gpu-%d-%d" % (lists, number)) for number in range(1000)]


class WritesOnTheTerminal(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        nasty = NASTY.encode()
        return [Told(nasty, nasty, message=nasty * 50, lease_s=-1), Told(b"\xff\x1b[2J")]

    def info(self) -> Info:
        nasty = f"/{NASTY.replace(chr(0), '')}"
        return Info(NASTY, NASTY, nasty, [*self.services, NASTY])

    def prepare(self, version: str) -> None:
        raise Refused(grpc.StatusCode.INTERNAL, NASTY.replace("\x00", ""))


class SaysMuchOfItself(Driver):
    def info(self) -> Info:
        return super().info()._replace(services=["v1.DRAPlugin", *("x" * 1000 for _ in range(1000))])


class SendsRandomLists(Driver):
    def speak(self, stream: Stream) -> Iterator[bytes]:
        dice = random.Random(4)
        good = health_list(self.devices(stream, 0))
        for _ in range(300):
            at = dice.randrange(len(good))
            yield dice.choice(
                [
                    dice.randbytes(dice.randrange(100)),
                    good[:at],
                    good[:at] + dice.randbytes(1) + good[at + 1 :],
                    good[:at] + dice.randbytes(5) + good[at:],
                ]
            )
        stream.stay()


OVERDONE: Final = {
    driver.__name__: driver
    for driver in (
        SpeaksWithoutPause,
        HasManyDevices,
        HasNewDevicesEveryTime,
        WritesOnTheTerminal,
        SaysMuchOfItself,
        SendsRandomLists,
    )
}


def _bear(driver: type[Driver]) -> Said:
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        driver(Path(directory)) as overdone,
    ):
        return conform_driver(overdone, "--socket", overdone.service, for_s=2)


# --- what becomes of them -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def met(request: pytest.FixtureRequest) -> Iterator[Runs]:
    work = {name: partial(_meet, manners) for name, manners in MANNERS.items()}
    with at_once(request, work | {name: partial(_bear, driver) for name, driver in OVERDONE.items()}) as runs:
        yield runs


@pytest.mark.parametrize("name", MANNERS)
def test_no_server_can_crash_or_hold_it(met: Runs, name: str) -> None:
    said = met[name].result()
    decent(said)
    assert said.code in {1, 2, 69}, "nobody could take that for a good driver"


@pytest.mark.parametrize("name", OVERDONE)
def test_no_driver_can_crash_it_or_make_it_write_without_end(met: Runs, name: str) -> None:
    decent(met[name].result())


def test_what_people_read_is_clean_too(short_tmp: Path) -> None:
    with WritesOnTheTerminal(short_tmp) as driver:
        places = ("--plugin-dir", driver.registry, "--kubelet-dir", driver.root, "--socket", driver.service)
        said = conform(*places, "--for", "2s", output="table")
    assert said.code == 2
    assert clean(said.output)


# --- what is no server at all -------------------------------------------------------------------------------


def unreachable(said: Said, *words: str) -> None:
    """69, in one line that names these."""
    assert said.code == 69, said.errors
    assert said.output == ""
    [line] = said.errors.splitlines()
    for word in words:
        assert word in line


def test_a_socket_that_is_not_there_is_69(short_tmp: Path) -> None:
    unreachable(conform_socket(short_tmp / "dra.sock"), f"{short_tmp}/dra.sock")


def test_a_socket_that_nobody_serves_any_more_is_69(short_tmp: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(short_tmp / "dra.sock"))
    unreachable(conform_socket(short_tmp / "dra.sock"), f"{short_tmp}/dra.sock")


def test_a_file_a_fifo_and_a_directory_are_no_socket(short_tmp: Path) -> None:
    (short_tmp / "file").touch()
    os.mkfifo(short_tmp / "fifo")
    for path in (short_tmp / "file", short_tmp / "fifo", short_tmp):
        unreachable(conform_socket(path), f"{path}: is no socket")


@pytest.fixture
def nobody() -> Iterator[None]:
    """Who runs the tests is not root, for a while."""
    assert main(["conform", "--socket", "/nowhere"]) == 69  # imports what nobody else may be able to read
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    yield
    os.seteuid(before)


@pytest.fixture
def locked(short_tmp: Path) -> Iterator[Path]:
    """A service socket that only its owner may open, in a directory that everybody may look into."""
    short_tmp.chmod(0o755)
    with Driver(short_tmp) as driver:
        driver.service.chmod(0)
        yield driver.service


def test_a_socket_that_this_user_may_not_open_is_77(
    locked: Path, nobody: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["conform", "--socket", str(locked), "--for", "2s"])
    said = capsys.readouterr()
    assert (code, said.out) == (77, "")
    assert str(locked) in said.err


# --- directories of registration sockets --------------------------------------------------------------------


def registered(directory: Path, *flags: object) -> Said:
    """What is said of a directory."""
    return conform("--plugin-dir", directory, "--kubelet-dir", directory.parent, "--for", "2s", *flags)


def test_a_directory_that_is_not_there_is_64(short_tmp: Path) -> None:
    (short_tmp / "file").touch()
    for name in ("plugins_registry", "file"):
        said = registered(short_tmp / name)
        assert (said.code, said.output) == (64, "")
        assert f"{short_tmp}/{name}" in said.errors


def test_a_directory_with_nothing_in_it_is_69(short_tmp: Path) -> None:
    unreachable(registered(short_tmp), f"{short_tmp}: no registration socket")


def test_a_file_among_the_sockets_is_seen(short_tmp: Path) -> None:
    with Driver(short_tmp) as driver:
        (driver.registry / f"{driver.name}-old-reg.sock").write_text("")
        said = conform_driver(driver, for_s=2)
    assert f"{driver.name}-old-reg.sock" in said.saw("registration.socket")
    assert said.results["registration.socket"] in {"warn", "fail"}


def test_a_socket_that_nobody_serves_any_more_is_seen_and_the_driver_is_judged(short_tmp: Path) -> None:
    with Driver(short_tmp) as driver, socket.socket(socket.AF_UNIX) as left:
        left.bind(str(driver.registry / f"{driver.name}-old-reg.sock"))
        left.close()
        said = conform_driver(driver, for_s=2)
    decent(said)
    assert said.results["health.first_list"] == "pass"


def test_of_several_drivers_one_is_to_be_named(short_tmp: Path) -> None:
    class Other(Driver):
        name = "nic.example.com"

    with Driver(short_tmp) as driver, Other(short_tmp) as other:
        said = conform_driver(driver, for_s=2)
        assert (said.code, said.output) == (64, "")
        assert driver.name in said.errors
        assert other.name in said.errors
        chosen = conform_driver(driver, "--driver", other.name, for_s=2)
        assert str(other.service) in json.dumps(chosen.document)
        assert str(driver.service) not in json.dumps(chosen.document)
        missing = conform_driver(driver, "--driver", "tpu.example.com", for_s=2)
        assert missing.code == 64
        assert "tpu.example.com" in missing.errors


class Vanishes(Driver):
    """Its directory goes while it is listened to."""

    def prepare(self, version: str) -> None:
        shutil.rmtree(self.root / "plugins_registry", ignore_errors=True)


def test_a_directory_that_vanishes_is_no_crash(short_tmp: Path) -> None:
    with Vanishes(short_tmp) as driver:
        decent(conform_driver(driver, for_s=2))


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
    ],
)
def test_what_cannot_be_asked_is_64(flags: tuple[str, ...]) -> None:
    said = conform(*flags)
    assert (said.code, said.output) == (64, "")
    assert "Traceback" not in said.errors

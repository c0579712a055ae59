"""Two instances of a driver: the newest speaks, the other keeps quiet, and nobody counts who is dead."""

import fcntl
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from patience import PATIENCE_S
from wire.claims import DRIVER, Serving
from wire.google import names, watch_health
from wire.plugin import Kubelet, claim
from wire.serving import device, eventually, report, sick

from agent.errors import ConfigError
from agent.serve.dra_plugin.leader import Instances, Turn

HOLDER = """
import sys
from pathlib import Path
from agent.serve.dra_plugin.leader import Instances

instances = Instances(Path(sys.argv[1]), "pod-of-another")
print("holds", flush=True)
sys.stdin.read()
"""


@contextmanager
def another(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """An instance in a process of its own, started by now."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        try:
            yield process
        finally:
            process.kill()


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("instance-*"))


def test_who_is_alone_speaks(tmp_path: Path) -> None:
    instances = Instances(tmp_path)
    assert instances.look() == Turn(speaks=True, others=0, gone=False)
    instances.leave()
    assert files(tmp_path) == []


def test_the_file_says_whose_it_is(tmp_path: Path) -> None:
    instances = Instances(tmp_path, "pod-1")
    (file,) = files(tmp_path)
    assert json.loads(file.read_text()) == {"pid": os.getpid(), "podUid": "pod-1"}
    instances.leave()


def test_only_the_newest_speaks(tmp_path: Path) -> None:
    first, second, third = (Instances(tmp_path) for _ in range(3))
    assert [one.look().speaks for one in (first, second, third)] == [False, False, True]
    third.leave()
    assert second.look() == Turn(speaks=True, others=1, gone=True)
    first.leave()
    assert second.look() == Turn(speaks=True, others=0, gone=True)
    second.leave()


def test_one_that_is_killed_is_gone_and_its_file_is_removed(tmp_path: Path) -> None:
    with another(tmp_path) as process:
        ours = Instances(tmp_path)
        assert ours.look() == Turn(speaks=True, others=1, gone=False)
        process.kill()
        process.wait()
        assert ours.look() == Turn(speaks=True, others=0, gone=True)
        assert len(files(tmp_path)) == 1
        ours.leave()


def test_if_the_newest_is_killed_the_next_newest_speaks(tmp_path: Path) -> None:
    ours = Instances(tmp_path)
    with another(tmp_path) as process:
        assert not ours.look().speaks
        process.kill()
        process.wait()
        assert ours.look() == Turn(speaks=True, others=0, gone=True)
    ours.leave()


def test_a_file_of_an_earlier_boot_counts_for_nothing(tmp_path: Path) -> None:
    """Its clock may have been far ahead of ours."""
    stale = tmp_path / f"instance-{10**19:020d}-{'0' * 16}.lock"
    stale.write_text('{"pid": 1, "podUid": ""}')
    ours = Instances(tmp_path)
    assert ours.look() == Turn(speaks=True, others=0, gone=False)
    assert not stale.exists()
    ours.leave()


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"pid": null}', b"[" * 100_000, b"x" * 100_000])
def test_whatever_stands_in_the_file_the_lock_counts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / f"instance-{10**19:020d}-{'0' * 16}.lock"
    path.write_bytes(content)
    ours = Instances(tmp_path)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not ours.look().speaks
    assert ours.look() == Turn(speaks=True, others=0, gone=True)
    ours.leave()


def test_what_is_no_instances_file_is_left_alone(tmp_path: Path) -> None:
    names = ["instance-1.lock", "serialize.lock", "dra.sock", f"instance-{'x' * 20}-{'0' * 16}.lock"]
    for name in names:
        (tmp_path / name).touch()
    ours = Instances(tmp_path)
    assert ours.look().others == 0
    ours.leave()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
def test_what_only_looks_like_an_instance_stops_nobody(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"instance-{10**19:020d}-{'0' * 16}.lock"
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    ours = Instances(tmp_path)
    assert ours.look() == Turn(speaks=True, others=0, gone=False)
    assert ours.look() == Turn(speaks=True, others=0, gone=False)
    ours.leave()


def test_a_file_that_is_removed_is_made_again_and_keeps_its_place(tmp_path: Path) -> None:
    older, newer = Instances(tmp_path), Instances(tmp_path)
    before = files(tmp_path)
    for path in before:
        path.unlink()
    assert older.look() == Turn(speaks=True, others=0, gone=False), "the newer has not looked yet"
    assert newer.look() == Turn(speaks=True, others=1, gone=False)
    assert older.look() == Turn(speaks=False, others=1, gone=False)
    assert files(tmp_path) == before
    older.leave()
    newer.leave()


def test_a_link_in_the_place_of_its_file_is_not_followed_and_is_told_of(tmp_path: Path) -> None:
    ours = Instances(tmp_path)
    (path,) = files(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        ours.look()
    assert not (tmp_path / "elsewhere").exists()
    path.unlink()
    assert ours.look() == Turn(speaks=True, others=0, gone=False)
    ours.leave()


def test_where_no_file_can_be_made_the_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/instance-.*: cannot make this file \(No such file"):
        Instances(tmp_path / "none")


# --- on the streams -----------------------------------------------------------------------------------------


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # short: a socket's path is 107 bytes at most
        yield Path(directory)


def test_the_older_keeps_quiet_and_says_everything_when_the_newer_is_gone(
    kubelet_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agent.serve.dra_plugin.server")
    with Serving(kubelet_dir, pod_uid="old") as old, watch_health(old.paths.service) as watcher:
        old.latest.publish(report([device("a"), device("b")]))
        assert names(watcher.next()) == ["a", "b"]
        with Serving(kubelet_dir, pod_uid="new"):
            eventually(lambda: "a newer instance" in caplog.text, "it is noticed")
            old.latest.publish(report([sick("a"), device("b", verified=2)]))
            with watch_health(old.paths.service) as late:
                late.opened()
                eventually(old.latest.is_taken, "it was taken")
                assert (watcher.pending(), late.pending()) == (0, 0), "streams are open and quiet"
        for _ in range(2):  # once more, for a kubelet that forgets late
            listed = watcher.next()
            assert names(listed) == ["a", "b"]
            assert listed.devices[0].health == 2
        old.latest.publish(report([sick("a"), device("b", verified=3)]))
        assert names(watcher.next()) == ["b"]


def test_the_newer_says_everything_once_more_when_the_older_is_killed(kubelet_dir: Path) -> None:
    """The kubelet has thrown away the driver's health when the older one's stream ended."""
    directory = kubelet_dir / "plugins" / DRIVER
    directory.mkdir(parents=True)
    with (
        another(directory) as process,
        Serving(kubelet_dir, pod_uid="new") as new,
        watch_health(new.paths.service) as watcher,
    ):
        new.latest.publish(report([device("a"), device("b")]))
        assert names(watcher.next()) == ["a", "b"]
        new.latest.publish(report([device("a", verified=2), device("b")]))
        assert names(watcher.next()) == ["a"]
        process.kill()
        assert names(watcher.next()) == ["a", "b"]
        assert names(watcher.next()) == ["a", "b"]


# --- a disk that hangs --------------------------------------------------------------------------------------


def test_a_look_that_hangs_holds_up_no_stream_no_claim_and_no_end(
    kubelet_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Serving(kubelet_dir) as serving:
        (ours,) = files(serving.paths.plugin_dir)
        theirs = ours.with_name("theirs")
        with theirs.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            theirs.rename(ours)
            eventually(lambda: "was removed, and is made again" in caplog.text, "the kernel lets it wait")
            with watch_health(serving.paths.service) as watcher, Kubelet(serving.paths.service) as kubelet:
                serving.latest.publish(report([device("a")]))
                assert names(watcher.next()) == ["a"]
                serving.latest.publish(report([sick("a")]))
                assert names(watcher.next()) == ["a"]
                assert kubelet.prepare(claim("a"))["uid-a"].error == ""
                assert serving.thread.stop(PATIENCE_S)
                with pytest.raises(grpc.RpcError, match="driver shutting down"):
                    watcher.next()
            assert serving.paths.service.exists(), "it is left to whoever hangs"
        eventually(lambda: "dh-files" not in threads(), "that can go on, and ends")
        assert [path.name for path in serving.paths.plugin_dir.iterdir()] == []
        assert list(serving.paths.registry_dir.iterdir()) == []


def threads() -> list[str]:
    return [one.name for one in threading.enumerate()]

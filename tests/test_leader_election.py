"""Leader election between instances of a driver: only the newest sends health; ended processes do not
count.
"""

import fcntl
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from patience import PATIENCE_S
from wire.claims import DRIVER, DriverInstance
from wire.google import names, watch_health
from wire.plugin import Kubelet, claim
from wire.serving import current_report, device, eventually, unhealthy

from agent.errors import ConfigError
from agent.serve.dra_plugin.instance_locks import InstancesState, LeaderElection
from agent.system.files import CheckedDirectory

HOLDER = """
import sys
from pathlib import Path
from agent.serve.dra_plugin.instance_locks import LeaderElection

instances = LeaderElection(Path(sys.argv[1]), "pod-of-another")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def other_process(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start an instance in another process, and wait until it holds its lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("instance-*"))


def test_single_instance_is_leader(tmp_path: Path) -> None:
    election = LeaderElection(tmp_path)
    assert election.check_instances() == InstancesState(is_leader=True, other_count=0, has_any_ended=False)
    election.leave()
    assert files(tmp_path) == []


def test_lock_file_contains_pid_and_pod_uid(tmp_path: Path) -> None:
    election = LeaderElection(tmp_path, "pod-1")
    (file,) = files(tmp_path)
    assert json.loads(file.read_text()) == {"pid": os.getpid(), "podUid": "pod-1"}
    election.leave()


def test_newest_instance_is_leader(tmp_path: Path) -> None:
    first, second, third = (LeaderElection(tmp_path) for _ in range(3))
    assert [instance.check_instances().is_leader for instance in (first, second, third)] == [
        False,
        False,
        True,
    ]
    third.leave()
    assert second.check_instances() == InstancesState(is_leader=True, other_count=1, has_any_ended=True)
    first.leave()
    assert second.check_instances() == InstancesState(is_leader=True, other_count=0, has_any_ended=True)
    second.leave()


def test_killed_instance_has_departed_and_its_file_is_removed(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        ours = LeaderElection(tmp_path)
        assert ours.check_instances() == InstancesState(is_leader=True, other_count=1, has_any_ended=False)
        process.kill()
        process.wait()
        assert ours.check_instances() == InstancesState(is_leader=True, other_count=0, has_any_ended=True)
        assert len(files(tmp_path)) == 1
        ours.leave()


def test_next_newest_instance_is_leader_after_newest_is_killed(tmp_path: Path) -> None:
    ours = LeaderElection(tmp_path)
    with other_process(tmp_path) as process:
        assert not ours.check_instances().is_leader
        process.kill()
        process.wait()
        assert ours.check_instances() == InstancesState(is_leader=True, other_count=0, has_any_ended=True)
    ours.leave()


def test_stale_file_of_an_earlier_boot_is_removed(tmp_path: Path) -> None:
    """The clock of that boot may have been far ahead of ours."""
    stale = tmp_path / f"instance-{10**19:020d}-{'0' * 16}.lock"
    stale.write_text('{"pid": 1, "podUid": ""}')
    ours = LeaderElection(tmp_path)
    assert ours.check_instances() == InstancesState(is_leader=True, other_count=0, has_any_ended=False)
    assert not stale.exists()
    ours.leave()


@contextmanager
def once_before(
    owner: object, name: str, act: Callable[[], object], when: Callable[..., bool] = lambda *_: True
) -> Iterator[None]:
    """Call `act` before the first call of a function whose arguments fulfil a condition."""
    with pytest.MonkeyPatch.context() as patch:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> object:
            if when(*args):
                patch.undo()
                act()
            return function(*args, **kwargs)

        patch.setattr(owner, name, call)
        yield


def test_ended_instance_is_not_running_for_two_that_check_at_once(tmp_path: Path) -> None:
    first, second = LeaderElection(tmp_path), LeaderElection(tmp_path)
    (tmp_path / f"instance-{10**19:020d}-{'ab' * 8}.lock").write_text("{}")
    found: list[InstancesState] = []
    with once_before(CheckedDirectory, "unlink", lambda: found.append(second.check_instances())):
        found.append(first.check_instances())
    assert found == [InstancesState(True, 1, False), InstancesState(False, 1, False)]
    assert len(files(tmp_path)) == 2
    first.leave()
    second.leave()


def test_instance_whose_file_was_removed_runs_for_two_that_check_meanwhile(tmp_path: Path) -> None:
    """Both have opened the removed file when its instance makes it again."""
    first, second, third = (LeaderElection(tmp_path) for _ in range(3))
    third_file = files(tmp_path)[2]
    found: list[InstancesState] = []
    removed = third_file.stat()

    def is_removed(fd: int, _: int) -> bool:
        return os.path.samestat(os.fstat(fd), removed)

    def replace() -> None:
        third_file.unlink()
        third.check_instances()

    def replace_while_second_checks() -> None:
        with once_before(fcntl, "flock", replace, is_removed):
            found.append(second.check_instances())

    with once_before(fcntl, "flock", replace_while_second_checks, is_removed):
        found.append(first.check_instances())
    assert found == [InstancesState(False, 2, False)] * 2
    assert third.check_instances() == InstancesState(True, 2, False)
    for instance in (first, second, third):
        instance.leave()
    assert files(tmp_path) == []


def test_instance_whose_file_others_remove_before_its_lock_makes_it_again(tmp_path: Path) -> None:
    first = LeaderElection(tmp_path)
    with once_before(fcntl, "flock", first.check_instances):
        second = LeaderElection(tmp_path)
    assert sorted(tmp_path.iterdir()) == files(tmp_path)
    assert first.check_instances() == InstancesState(False, 1, False)
    first.leave()
    second.leave()


def test_unfinished_file_of_a_killed_instance_is_removed(tmp_path: Path) -> None:
    unfinished = tmp_path / f".instance-{10**19:020d}-{'0' * 16}.lock"
    unfinished.touch()
    ours = LeaderElection(tmp_path)
    with unfinished.open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert ours.check_instances() == InstancesState(True, 0, False)
        assert unfinished.exists()
    assert ours.check_instances() == InstancesState(True, 0, False)
    assert not unfinished.exists()
    ours.leave()


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"pid": null}', b"[" * 100_000, b"x" * 100_000])
def test_lock_counts_with_any_file_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / f"instance-{10**19:020d}-{'0' * 16}.lock"
    path.write_bytes(content)
    ours = LeaderElection(tmp_path)
    with path.open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert not ours.check_instances().is_leader
    assert ours.check_instances() == InstancesState(is_leader=True, other_count=0, has_any_ended=True)
    ours.leave()


def test_other_files_in_the_directory_are_kept(tmp_path: Path) -> None:
    names = ["instance-1.lock", "serialize.lock", "dra.sock", f"instance-{'x' * 20}-{'0' * 16}.lock"]
    for name in names:
        (tmp_path / name).touch()
    ours = LeaderElection(tmp_path)
    assert ours.check_instances().other_count == 0
    ours.leave()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
def test_file_of_another_type_does_not_count_as_instance(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"instance-{10**19:020d}-{'0' * 16}.lock"
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    ours = LeaderElection(tmp_path)
    assert ours.check_instances() == InstancesState(is_leader=True, other_count=0, has_any_ended=False)
    assert ours.check_instances() == InstancesState(is_leader=True, other_count=0, has_any_ended=False)
    ours.leave()


def test_removed_lock_file_is_created_again_with_the_same_name(tmp_path: Path) -> None:
    older, newer = LeaderElection(tmp_path), LeaderElection(tmp_path)
    before = files(tmp_path)
    for path in before:
        path.unlink()
    assert older.check_instances() == InstancesState(is_leader=True, other_count=0, has_any_ended=False), (
        "the newer instance has not checked yet"
    )
    assert newer.check_instances() == InstancesState(is_leader=True, other_count=1, has_any_ended=False)
    assert older.check_instances() == InstancesState(is_leader=False, other_count=1, has_any_ended=False)
    assert files(tmp_path) == before
    older.leave()
    newer.leave()


def test_symlink_in_place_of_lock_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    ours = LeaderElection(tmp_path)
    (path,) = files(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert ours.check_instances() == InstancesState(is_leader=True, other_count=0, has_any_ended=False)
    assert list(tmp_path.iterdir()) == [path]
    assert not path.is_symlink()
    ours.leave()


def test_symlink_in_place_of_an_unfinished_lock_file_is_not_followed(tmp_path: Path) -> None:
    ours = LeaderElection(tmp_path)
    (path,) = files(tmp_path)
    path.unlink()
    unfinished = tmp_path / f".{path.name}"
    unfinished.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        ours.check_instances()
    unfinished.unlink()
    assert ours.check_instances() == InstancesState(is_leader=True, other_count=0, has_any_ended=False)
    assert list(tmp_path.iterdir()) == [path]
    ours.leave()


def test_missing_directory_is_named_in_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/instance-.*: cannot be created: No such file"):
        LeaderElection(tmp_path / "none")


# --- streams of instances -----------------------------------------------------------------------------------


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # short: a socket's path is 107 bytes at most
        yield Path(directory)


def test_older_instance_is_mute_and_resends_all_after_newer_ended(
    kubelet_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agent.serve.dra_plugin.instance_server")
    with DriverInstance(kubelet_dir, pod_uid="old") as old, watch_health(old.paths.service) as watcher:
        old.latest.publish(current_report([device("a"), device("b")]))
        assert names(watcher.next()) == ["a", "b"]
        with DriverInstance(kubelet_dir, pod_uid="new") as new, watch_health(new.paths.service):
            eventually(lambda: "a newer instance" in caplog.text, "the newer instance is noticed")
            old.latest.publish(current_report([unhealthy("a"), device("b", verified=2)]))
            with watch_health(old.paths.service) as late_watcher:
                late_watcher.wait_opened()
                eventually(old.latest.is_delivered, "the report was taken")
                assert (watcher.pending_count(), late_watcher.pending_count()) == (0, 0), (
                    "streams are open without lists"
                )
        for _ in range(2):  # once more, for a kubelet that forgets late
            listed = watcher.next()
            assert names(listed) == ["a", "b"]
            assert listed.devices[0].health == 2
        old.latest.publish(current_report([unhealthy("a"), device("b", verified=3)]))
        assert names(watcher.next()) == ["b"]


def test_newer_instance_mutes_no_other_until_the_kubelet_uses_it(
    kubelet_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agent.serve.dra_plugin.instance_locks")
    with DriverInstance(kubelet_dir, pod_uid="old") as old, watch_health(old.paths.service) as watcher:
        old.latest.publish(current_report([device("a")]))
        assert names(watcher.next()) == ["a"]
        eventually(lambda: bool(files(old.paths.plugin_dir)), "the old instance counts")
        with DriverInstance(kubelet_dir, pod_uid="new") as new:
            eventually(lambda: "another instance of the driver is running" in caplog.text, "new has checked")
            assert len(files(old.paths.plugin_dir)) == 1
            with Kubelet(new.paths.registration) as kubelet:
                kubelet.notify(False, "the versions are not supported")
                kubelet.notify(True)
            eventually(lambda: len(files(old.paths.plugin_dir)) == 2, "the new instance counts")


def test_instance_that_does_not_count_yet_is_no_other_instance(tmp_path: Path) -> None:
    old, new = LeaderElection(tmp_path), LeaderElection(tmp_path, counts=False)
    alone = InstancesState(is_leader=True, other_count=0, has_any_ended=False)
    assert new.check_instances(counts=False) == alone._replace(other_count=1)
    assert old.check_instances() == alone
    assert new.check_instances().is_leader
    assert not old.check_instances().is_leader
    new.leave()
    assert old.check_instances() == alone._replace(has_any_ended=True)
    old.leave()
    third = LeaderElection(tmp_path, counts=False)
    third.leave()
    assert list(tmp_path.iterdir()) == []


def test_newer_instance_resends_all_when_older_is_killed(
    kubelet_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kubelet has forgotten the driver's health at the end of the older one's stream."""
    directory = kubelet_dir / "plugins" / DRIVER
    directory.mkdir(parents=True)
    caplog.set_level(logging.INFO)
    with (
        other_process(directory) as process,
        DriverInstance(kubelet_dir, pod_uid="new") as new,
        watch_health(new.paths.service) as watcher,
    ):
        new.latest.publish(current_report([device("a"), device("b")]))
        assert names(watcher.next()) == ["a", "b"]
        new.latest.publish(current_report([device("a", verified=2), device("b")]))
        assert names(watcher.next()) == ["a"]
        eventually(
            lambda: "another instance of the driver is running" in caplog.text, "the older one was seen"
        )
        process.kill()
        assert names(watcher.next()) == ["a", "b"]
        assert names(watcher.next()) == ["a", "b"]


# --- a disk that hangs --------------------------------------------------------------------------------------


def test_hanging_check_delays_no_stream_no_claim_and_no_shutdown(
    kubelet_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.serve.grpc.server.GRACE_S", PATIENCE_S / 2)  # the client may read late
    earlier = file_threads()
    with DriverInstance(kubelet_dir) as driver_instance:
        with Kubelet(driver_instance.paths.registration) as kubelet:
            kubelet.notify(True)
        eventually(lambda: bool(files(driver_instance.paths.plugin_dir)), "the instance counts")
        (ours,) = files(driver_instance.paths.plugin_dir)
        other_file = ours.with_name("other")
        with other_file.open("w") as locked:
            fcntl.flock(locked, fcntl.LOCK_EX)
            other_file.rename(ours.with_name(f".{ours.name}"))
            ours.unlink()
            eventually(
                lambda: ".lock: was removed by another process; created again" in caplog.text,
                "the check waits for the lock",
            )
            with (
                watch_health(driver_instance.paths.service) as watcher,
                Kubelet(driver_instance.paths.service) as kubelet,
            ):
                driver_instance.latest.publish(current_report([device("a")]))
                assert names(watcher.next()) == ["a"]
                driver_instance.latest.publish(current_report([unhealthy("a")]))
                assert names(watcher.next()) == ["a"]
                assert kubelet.prepare(claim("a"))["uid-a"].error == ""
                assert driver_instance.thread.stop(PATIENCE_S)
                with pytest.raises(grpc.RpcError, match="driver shutting down"):
                    watcher.next()
            assert driver_instance.paths.service.exists(), "the hanging thread removes the file"
        eventually(lambda: file_threads() <= earlier, "the thread continues and ends")
        assert [path.name for path in driver_instance.paths.plugin_dir.iterdir()] == []
        assert list(driver_instance.paths.registry_dir.iterdir()) == []


def file_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("dh-files")}

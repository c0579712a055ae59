"""Unix sockets: their mode, stale sockets that are replaced, and served sockets that are kept."""

import asyncio
import fcntl
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from other_user import OTHER_USER, become_other_user, give_to_other_user
from patience import PATIENCE_S
from wire.serving import Serving, descriptors, eventually, fail_once, is_served, remove_tree

from agent.errors import ConfigError, PermissionDeniedError, ResourceBusyError
from agent.model.socket_address import SOCKET_PATH_LIMIT
from agent.serve import grpc_servers, sockets
from agent.serve.grpc.server import HardenedServer
from agent.serve.grpc_servers import CHECK_S, GrpcServers
from agent.serve.sockets import UnixListener, check_path_length, make_socket_directory
from agent.system.files import CheckedDirectory, DirectoryLock, LockHeld
from agent.system.threads.latest_value import LatestValue


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777], indirect=True, ids=oct)
def test_socket_mode_is_0660_with_any_umask(tmp_path: Path, umask: int) -> None:
    listener = UnixListener(tmp_path / "a.sock")
    assert stat.S_IMODE((tmp_path / "a.sock").lstat().st_mode) == 0o660
    listener.close()


@pytest.mark.parametrize("umask", [0o000, 0o077], indirect=True, ids=oct)
def test_directory_mode_is_0750_with_any_umask(tmp_path: Path, umask: int) -> None:
    make_socket_directory(tmp_path / "a" / "run", setting="--runtime-dir")
    assert [stat.S_IMODE((tmp_path / path).stat().st_mode) for path in ("a", "a/run")] == [0o755, 0o750]


def test_listener_closes_in_a_directory_that_all_users_may_write_to(tmp_path: Path) -> None:
    others = descriptors()
    listener = UnixListener(tmp_path / "a.sock")
    own = {entry for entry in descriptors() - others if "socket:" in entry[1] or str(tmp_path) in entry[1]}
    assert len(own) >= 2, "the socket and its file"
    tmp_path.chmod(0o777)
    listener.close()
    assert not own & descriptors()
    assert (tmp_path / "a.sock").is_socket()


def test_client_that_connects_before_accept_waits(tmp_path: Path) -> None:
    listener = UnixListener(tmp_path / "a.sock")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "a.sock"))
        listener.sock.accept()[0].close()
    listener.close()


def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "a.sock"))
    listener = UnixListener(tmp_path / "a.sock")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "a.sock"))
    listener.close()


def test_socket_of_a_starting_server_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server creates the file some time before it listens."""
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as starting:
        starting.bind(str(path))
        monkeypatch.setattr(sockets, "STARTUP_S", PATIENCE_S)  # the machine may be slow
        monkeypatch.setattr(time, "time", lambda: path.stat().st_ctime)
        monkeypatch.setattr(time, "sleep", lambda _: starting.listen())
        with pytest.raises(ResourceBusyError, match="another process serves it"):
            UnixListener(path)
        assert path.is_socket()


@pytest.mark.parametrize("clock_step_s", [-3600, 0, 3600])
def test_new_stale_socket_is_replaced_after_a_clock_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock_step_s: int
) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "a.sock"))
    now_s = time.time() + clock_step_s
    monkeypatch.setattr(time, "time", lambda: now_s)
    UnixListener(tmp_path / "a.sock").close()


@contextmanager
def once_before(owner: object, name: str, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` before the first call of a function."""
    with pytest.MonkeyPatch.context() as patch:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> object:
            patch.undo()
            act()
            return function(*args, **kwargs)

        patch.setattr(owner, name, call)
        yield


class StartingListener:
    """Thread that creates a listener, up to the moment in which it ends or waits for another server."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_waited = Event()
        self.result: UnixListener | Exception | None = None
        self._thread = Thread(target=self._create, daemon=True)

    def start(self) -> None:
        """Start the thread; return when it has ended or waits."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sockets, "LOCK_S", PATIENCE_S)
            patch.setattr(time, "sleep", lambda _: self._has_waited.set())
            self._thread.start()
            assert self._has_waited.wait(PATIENCE_S)

    def wait(self) -> UnixListener | Exception | None:
        """Wait until the thread has ended; return the listener or the error."""
        self._thread.join(PATIENCE_S)
        return self.result

    def _create(self) -> None:
        try:
            self.result = UnixListener(self._path)
        except ResourceBusyError as error:
            self.result = error
        self._has_waited.set()


def bind_stale(path: Path) -> None:
    """Create a socket that no process serves, in a time before which a server may start to listen."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))


def test_socket_that_replaced_a_stale_one_is_not_removed_by_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "STARTUP_S", 0.0)
    path = tmp_path / "a.sock"
    bind_stale(path)
    second = StartingListener(path)
    with once_before(CheckedDirectory, "unlink", second.start):
        first = UnixListener(path)
    assert isinstance(second.wait(), ResourceBusyError)
    assert first.is_intact()
    assert is_served(path)
    first.close()


def test_ending_server_keeps_the_socket_of_a_starting_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "STARTUP_S", 0.0)
    path = tmp_path / "a.sock"
    ending, starting = UnixListener(path), StartingListener(path)
    with once_before(CheckedDirectory, "unlink", starting.start):
        ending.close()
    started = starting.wait()
    assert isinstance(started, UnixListener)
    assert started.is_intact()
    assert is_served(path)
    started.close()


def test_socket_that_another_server_binds_during_the_check_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes no lock; it has the inode number of the stale socket on some file systems."""
    monkeypatch.setattr(sockets, "STARTUP_S", 0.0)
    path = tmp_path / "a.sock"
    bind_stale(path)
    with socket.socket(socket.AF_UNIX) as other:

        def serve() -> None:
            path.unlink()
            other.bind(str(path))
            other.listen()

        with (
            once_before(sockets, "_is_replaced", serve),
            pytest.raises(ResourceBusyError, match="another process serves it"),
        ):
            UnixListener(path)
        assert is_served(path)


def test_socket_that_another_server_binds_before_ours_raises_busy(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as other:
        with (
            once_before(os, "fchmod", lambda: other.bind(str(path))),
            pytest.raises(ResourceBusyError, match="another process serves it"),
        ):
            UnixListener(path)
        assert path.is_socket()


def test_directory_that_another_server_has_locked_raises_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "LOCK_S", 0.0)
    path = tmp_path / "a.sock"
    ours = UnixListener(path)
    directory = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    with pytest.raises(ResourceBusyError, match=r"another process has locked it \(flock\) for 0 s; find"):
        UnixListener(tmp_path / "b.sock")
    ours.close()
    assert [file.name for file in tmp_path.iterdir()] == ["a.sock"], "stays as a stale socket"
    os.close(directory)


def test_served_socket_raises_busy(tmp_path: Path) -> None:
    first = UnixListener(tmp_path / "a.sock")
    with pytest.raises(ResourceBusyError, match=r"a\.sock: another process serves it; stop that process"):
        UnixListener(tmp_path / "a.sock")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "a.sock"))
    first.close()


def test_served_socket_with_full_queue_raises_busy(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(tmp_path / "a.sock"))
        busy.listen(0)
        waiting.connect(str(tmp_path / "a.sock"))
        with pytest.raises(ResourceBusyError, match="another process serves it; stop that process"):
            UnixListener(tmp_path / "a.sock")


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_other_file_in_place_of_socket_is_refused_and_kept(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.sock"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        ConfigError, match="is not a socket, but a socket must be created there; remove the file"
    ):
        UnixListener(path)
    assert os.path.lexists(path)


def test_close_removes_the_file(tmp_path: Path) -> None:
    listener = UnixListener(tmp_path / "a.sock")
    listener.close()
    assert not (tmp_path / "a.sock").exists()
    listener.close()


def test_close_keeps_file_of_another_listener(tmp_path: Path) -> None:
    ours = UnixListener(tmp_path / "a.sock")
    (tmp_path / "a.sock").unlink()
    other = UnixListener(tmp_path / "a.sock")
    ours.close()
    assert (tmp_path / "a.sock").exists()
    other.close()


def test_missing_directory_is_named_in_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/a\.sock: cannot be created: No such file"):
        UnixListener(tmp_path / "none" / "a.sock")


def test_too_long_path_error_has_the_sizes() -> None:
    base = Path("/" + "r" * 91)
    check_path_length(base / ("s" * (SOCKET_PATH_LIMIT - 93)), flag="--runtime-dir")
    with pytest.raises(ConfigError) as raised:
        check_path_length(base / ("s" * 20), flag="--runtime-dir")
    assert str(raised.value) == (
        f"socket path {base / ('s' * 20)}: 113 bytes, limit 107; choose a shorter one with --runtime-dir"
    )


def test_path_length_is_counted_in_bytes() -> None:
    with pytest.raises(ConfigError, match=r"socket path .*: 111 bytes"):
        check_path_length(Path("/" + "ä" * 55), flag="--runtime-dir")


def test_path_of_maximum_length_works() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = Path(directory) / ("s" * (SOCKET_PATH_LIMIT - len(directory) - 1))
        assert len(os.fsencode(path)) == SOCKET_PATH_LIMIT
        UnixListener(path).close()


def test_file_in_place_of_directory_is_named_in_error(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    for noun, path, why in (
        ("path", tmp_path / "run", "is not a directory; choose another with --runtime-dir"),
        ("directory", tmp_path / "run" / "below", "cannot be created: Not a directory"),
    ):
        with pytest.raises(ConfigError, match=f"^{noun} {path}: {why}$"):
            make_socket_directory(path, setting="--runtime-dir")


# --- permissions of the files -------------------------------------------------------------------------------


def test_world_writable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o1777)
    with pytest.raises(ConfigError) as raised:
        servers(tmp_path / "run", "a")
    assert str(raised.value) == (
        f"directory {tmp_path}/run: has mode 1777: all users may write to it; name a directory in it, or "
        "choose another directory with --runtime-dir"
    )
    assert list((tmp_path / "run").iterdir()) == []


def test_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    give_to_other_user(tmp_path / "run")
    why = "belongs to uid 65534, who can replace its files; it must belong to root, or choose another"
    with pytest.raises(ConfigError, match=f"run: {why} directory with --runtime-dir"):
        servers(tmp_path / "run", "a")
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "own")
    give_to_other_user(tmp_path / "link")
    with pytest.raises(ConfigError, match=f"link: {why}"):
        servers(tmp_path / "link", "a")


def test_drivers_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "elsewhere" / "precious.sock"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "drivers").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="run/drivers: is a symbolic link; remove it, or choose another"):
        servers(tmp_path / "run", "a")
    servers(tmp_path / "run").close()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["precious.sock"]


def test_own_link_to_the_runtime_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "private")
    servers(tmp_path / "run", "a").close()
    assert (tmp_path / "private" / "drivers").is_dir()


@pytest.mark.parametrize(
    ("kind", "error"),
    [("symbolic link", OSError), ("second name", ValueError), ("FIFO", ValueError), ("served", LockHeld)],
)
def test_lock_file_that_is_not_the_agents_is_kept(tmp_path: Path, kind: str, error: type[Exception]) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "agent.lock"
    if kind == "symbolic link":
        path.symlink_to(tmp_path / "precious")
    elif kind == "second name":
        path.hardlink_to(tmp_path / "precious")
    elif kind == "FIFO":
        os.mkfifo(path)
    first = DirectoryLock(tmp_path / "run") if kind == "served" else None
    with pytest.raises(error):
        DirectoryLock(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "precious"
    if first is not None:
        assert path.read_text() == f"{os.getpid()}\n"
        first.close()


# --- sockets of the agent -----------------------------------------------------------------------------------


def test_removed_sockets_and_lock_are_created_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def is_connected(path: Path) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(path)) == 0

    run = tmp_path / "run"
    make_socket_directory(run, setting="--runtime-dir")
    lock = DirectoryLock(run)
    agent_server = Serving(run, locks=[lock])
    with agent_server:
        for remove in (
            agent_server.health.unlink,
            partial(remove_tree, run / "drivers"),
            partial(remove_tree, run),
        ):
            eventually(
                lambda: is_connected(agent_server.health) and is_connected(agent_server.agent), "served"
            )
            caplog.clear()
            remove()
            eventually(
                lambda: is_connected(agent_server.health) and is_connected(agent_server.agent), "served again"
            )
            eventually(
                lambda: f"socket {agent_server.health}: was removed by another" in caplog.text, "logged"
            )
        eventually(lambda: f"lock file {run}/agent.lock: was removed by another" in caplog.text, "logged")
        with pytest.raises(LockHeld):
            DirectoryLock(run)
        assert stat.S_IMODE(run.stat().st_mode) == 0o750
    assert not agent_server.health.exists()
    lock.close()


def test_removed_state_directory_is_created_and_locked_again_at_once(tmp_path: Path) -> None:
    """No second agent can use the directory; its watch, not the check once a minute, finds the removal."""
    state = tmp_path / "state"
    state.mkdir()
    lock = DirectoryLock(state)
    with Serving(tmp_path / "run", locks=[lock]) as agent_server:
        eventually(agent_server.health.exists, "served")
        remove_tree(state)
        eventually(lock.path.exists, "the lock file", CHECK_S / 2)
        agent_server.health.unlink()
        eventually(agent_server.health.exists, "served again")
        with pytest.raises(LockHeld):
            DirectoryLock(state)
    lock.close()


def test_state_lock_that_cannot_be_restored_keeps_no_socket_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    lock = DirectoryLock(state)
    with Serving(tmp_path / "run", locks=[lock]) as agent_server:
        eventually(agent_server.health.exists, "served")
        state.chmod(0o777)
        lock.path.unlink()
        agent_server.health.unlink()
        eventually(agent_server.health.exists, "served again")
        failure = f"directory {state} has mode 0777: all users may write to it; run chmod o-w on it; a "
        eventually(lambda: failure in caplog.text, "logged")
    lock.close()
    assert "clients cannot connect" not in caplog.text


def test_created_socket_that_cannot_be_served_is_created_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Serving(tmp_path / "run") as agent_server:
        eventually(agent_server.health.exists, "served")
        raised = fail_once(monkeypatch, HardenedServer, "listen")
        agent_server.health.unlink()
        eventually(
            lambda: f"socket {agent_server.health}: was removed by another" in caplog.text, "served again"
        )
        assert raised
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(agent_server.health))
    assert "created again: [Errno 12] Cannot allocate memory; clients cannot connect" in caplog.text


def test_directory_that_epoll_cannot_watch_is_checked_and_watched_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The user's watches of epoll are used up for a moment (fs.epoll.max_user_watches)."""
    monkeypatch.setattr(grpc_servers, "UNWATCHED_CHECK_S", 0.1)
    raised = fail_once(monkeypatch, asyncio.SelectorEventLoop, "add_reader")
    with Serving(tmp_path / "run") as agent_server:
        eventually(lambda: bool(raised), "the failed call")
        for times in (1, 2):  # found by a check, then by the watch
            agent_server.health.unlink(missing_ok=True)
            eventually(lambda: is_served(agent_server.health), "served again")
            eventually(lambda times=times: caplog.text.count("process; created again") == times, "logged")


def test_socket_that_cannot_be_restored_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent_server = Serving(tmp_path / "run")
    with agent_server:
        eventually(agent_server.health.exists, "served")
        (tmp_path / "file").write_text("file of another program")
        (tmp_path / "file").replace(agent_server.health)  # at once: the agent never finds the path free
        failure = (
            f"sockets in {tmp_path}/run: removed by another process and not created again: file "
            f"{agent_server.health}: is not a socket"
        )
        eventually(lambda: failure in caplog.text, "logged")
    assert caplog.text.count("not created again") == 1
    assert agent_server.health.read_text() == "file of another program"


@pytest.mark.parametrize("steps", range(1, 14))
def test_shutdown_while_a_socket_is_restored_removes_the_socket_file(tmp_path: Path, steps: int) -> None:
    async def restore_and_stop() -> None:
        created = servers(tmp_path)
        (path,) = created.paths
        server = HardenedServer([])
        await server.listen(created._listeners[path.name].sock)
        path.unlink()
        restoring = asyncio.create_task(created._restore_files({path.name: server}))
        for _ in range(steps):
            await asyncio.sleep(0)
        restoring.cancel()
        await asyncio.gather(restoring, return_exceptions=True)
        await server.stop("driver shutting down")
        created.close()
        assert not path.exists()

    asyncio.run(restore_and_stop())


def servers(runtime_dir: Path, *drivers: str) -> GrpcServers:
    return GrpcServers(LatestValue(), runtime_dir=runtime_dir, drivers=drivers, version="1")


def test_each_driver_and_the_agent_have_a_socket(tmp_path: Path) -> None:
    created = servers(tmp_path / "run", "gpu.example.com", "cpu.example.com")
    names = ["drivers/gpu.example.com.sock", "drivers/cpu.example.com.sock", "agent.sock"]
    assert [str(path.relative_to(tmp_path / "run")) for path in created.paths] == names
    assert all(stat.S_ISSOCK(path.lstat().st_mode) for path in created.paths)
    created.close()
    assert not any(path.exists() for path in created.paths)


@pytest.mark.parametrize("name", ["a", "gpu.example.com", "0-0.a", "a" * 63])
def test_dns_subdomain_is_a_valid_driver_name(tmp_path: Path, name: str) -> None:
    servers(Path(tempfile.mkdtemp(dir="/tmp")), name).close()


@pytest.mark.parametrize(
    "name", ["", "GPU.example.com", "a..b", ".a", "a.", "-a", "a-", "a/b", "../a", "a\n", "ä"]
)
def test_invalid_driver_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        servers(tmp_path, name)
    assert str(raised.value).startswith(f"driver name {name!r} is not a DNS subdomain")


def test_too_long_driver_name_error_has_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is 64 bytes long, limit 63"):
        servers(tmp_path, "a" * 64)


def test_driver_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"driver 'a\.b' is given 2 times"):
        servers(tmp_path, "a.b", "c.d", "a.b")


def test_failure_of_one_socket_removes_all_sockets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"socket path .* bytes, limit"):
        servers(tmp_path / ("r" * 60), "a", "b" * 63)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "agent.sock").write_text("other file")
    with pytest.raises(ConfigError, match="is not a socket"):
        servers(tmp_path, "a")
    assert list((tmp_path / "drivers").iterdir()) == []


def test_second_agent_on_same_directory_is_refused(tmp_path: Path) -> None:
    first = servers(tmp_path, "a")
    with pytest.raises(ResourceBusyError, match="another process serves it; stop that process"):
        servers(tmp_path, "b")
    assert first.paths[-1].exists()
    assert not (tmp_path / "drivers" / "b.sock").exists()
    first.close()


def test_only_stale_sockets_of_former_drivers_are_removed(tmp_path: Path) -> None:
    drivers = tmp_path / "drivers"
    drivers.mkdir()
    for name in ("gone.sock", "stays.sock", "foreign.sock", "other.socket"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(drivers / name))
    try:
        os.chown(drivers / "foreign.sock", OTHER_USER, -1)
    except PermissionError:  # only root with CAP_CHOWN can change the owner
        (drivers / "foreign.sock").unlink()
        (drivers / "foreign.sock").touch()
    (drivers / "file.sock").touch()
    (drivers / "link.sock").symlink_to(drivers / "other.socket")
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(drivers / "living.sock"))
        served.listen()
        created = servers(tmp_path, "stays")
        remaining = {path.name for path in drivers.iterdir()}
        assert remaining == {
            "stays.sock",
            "foreign.sock",
            "other.socket",
            "file.sock",
            "link.sock",
            "living.sock",
        }
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(drivers / "stays.sock"))
        created.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without permission")
def test_unwritable_directory_raises_permission_denied() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        become_other_user()
        try:
            with pytest.raises(PermissionDeniedError, match=r"a\.sock: cannot be created: Permission denied"):
                UnixListener(Path(directory) / "a.sock")
            with pytest.raises(PermissionDeniedError, match="cannot be created: no permission"):
                servers(Path(directory), "a")
        finally:
            os.seteuid(0)

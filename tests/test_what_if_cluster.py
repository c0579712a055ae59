"""``drahealth what-if`` with URLs, and on the workers of a dask.distributed cluster of this machine."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from agents import run_command
from own_process import run_in_own_process
from patience import PATIENCE_S
from record_nodes import gpu_day, host_day
from reserved_ports import reserved_port
from test_cli_e2e import AGENT
from test_record import write_segment

from agent.cli.main import main
from agent.errors import ConfigError, DrahealthError
from agent.record import what_if_cluster
from agent.record.segment_file import SegmentReader, UrlPath, segment_path
from agent.version import VERSION

REPOSITORY = Path(__file__).parents[1]

needs_dask = pytest.mark.skipif(
    not (find_spec("distributed") and find_spec("fsspec")), reason="distributed and fsspec are not installed"
)


class Cluster:
    """dask scheduler of this machine without workers. It and its workers end with this process."""

    def __init__(self, stack: ExitStack, directory: Path, **environ: str) -> None:
        self._stack = stack
        self._file = directory / "scheduler.json"
        self._environ = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environ
        # A scheduler without a dashboard needs no port that another one may have.
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        self.address = wait_for(self._address)

    def worker(self, cwd: Path = REPOSITORY, **environ: str) -> "subprocess.Popen[bytes]":
        """Start a worker with one thread, in a directory whose packages it imports first."""
        options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", self._file.parent)
        return self._start("worker", *map(str, options), cwd=cwd, **environ)

    def _start(
        self, part: str, *options: str, cwd: Path = REPOSITORY, **environ: str
    ) -> "subprocess.Popen[bytes]":
        command = ["setpriv", "--pdeathsig=KILL", sys.executable, "-m", f"distributed.cli.dask_{part}"]
        process = subprocess.Popen(
            [*command, "--scheduler-file", str(self._file), *options],
            cwd=cwd,
            env=self._environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _address(self) -> str:
        try:
            return str(json.loads(self._file.read_text())["address"])
        except (OSError, ValueError):  # not written, or in part
            return ""


def wait_for(condition: Any) -> Any:
    """Return the first true result of a function, which is called until then."""
    patience_s = 3 * PATIENCE_S  # a scheduler, two workers and the command start, one after the other
    until_s = time.monotonic() + patience_s
    while not (result := condition()):
        assert time.monotonic() < until_s, f"not true within {patience_s:g} s"
        time.sleep(0.02)
    return result


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "other.toml"
    path.write_text('[errors]\ncorrectable = 1\n[[rules]]\ncode = "gpu.lost"\noff = true\n')
    return path


def write_fleet(directory: Path) -> list[Path]:
    """Write records of three nodes, one of them damaged, and return their directories."""
    places = [directory / name for name in "abc"]
    for place in places:
        place.mkdir(parents=True)
    steps = gpu_day(3, 8)
    write_segment(segment_path(places[0], 1), steps[: len(steps) // 2])
    write_segment(segment_path(places[0], 2), steps[len(steps) // 2 :])
    write_segment(segment_path(places[1], 1), host_day(1, 5))
    segment_path(places[2], 1).write_bytes(b"nothing")
    return places


def output(done: "subprocess.CompletedProcess[str]") -> tuple[str, str]:
    """Return standard output without the time of the comparison, and standard error."""
    assert done.returncode == 0, done.stderr
    return "".join(line for line in done.stdout.splitlines(True) if "elapsedSeconds" not in line), done.stderr


def make_trap(path: Path) -> Path:
    """Replace a segment by a FIFO, so that a worker hangs that reads it; return the segment's copy."""
    copy = path.with_suffix(".copy")
    path.rename(copy)
    os.mkfifo(path)
    return copy


def reader_of(
    fifo: Path, processes: list["subprocess.Popen[bytes]"], stack: ExitStack
) -> "subprocess.Popen[bytes]":
    """Wait until one of the processes reads the FIFO, and return the process, which waits for data."""

    def open_fifo() -> Any:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # ENXIO: no reader yet
            return None

    def reader() -> Any:
        return next(
            (process for process in processes if process.poll() is None and has_open(process.pid, fifo)), None
        )

    stack.callback(os.close, wait_for(open_fifo))
    return wait_for(reader)


def has_open(pid: int, path: Path) -> bool:
    try:
        return any(os.readlink(file) == str(path) for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # the process or the descriptor has gone
        return False


def kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def run_on(cluster: Cluster, places: list[Path], config: Path, stack: ExitStack) -> "subprocess.Popen[str]":
    """Start the command on a cluster."""
    arguments = ("--config", config, "--scheduler", cluster.address, "-o", "json")
    process = subprocess.Popen(
        [*AGENT, "what-if", *map(str, (*places, *arguments))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def wait_for_end(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    out, err = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess([], process.returncode, out, err)


# --- the cluster --------------------------------------------------------------------------------------------


@needs_dask
def test_files_of_a_lost_worker_are_compared_by_the_other_one(
    stack: ExitStack, tmp_path: Path, config: Path
) -> None:
    places = write_fleet(tmp_path / "fleet")
    local, _ = output(
        run_command("what-if", *map(str, places), "--config", str(config), "--jobs", "2", "-o", "json")
    )
    cluster = Cluster(stack, tmp_path)
    workers = [cluster.worker() for _ in range(2)]
    fifo = segment_path(places[0], 1)
    copy = make_trap(fifo)
    process = run_on(cluster, places, config, stack)
    victim = reader_of(fifo, workers, stack)
    copy.replace(fifo)
    kill(victim)
    out, err = output(wait_for_end(process))
    assert out == local
    assert f"{segment_path(places[2], 1)}: the file is not a drahealth record" in err
    assert [worker.poll() for worker in workers if worker is not victim] == [None]


@needs_dask
def test_record_on_which_workers_die_is_named_and_left_out(
    stack: ExitStack, tmp_path: Path, config: Path
) -> None:
    places = write_fleet(tmp_path / "fleet")
    arguments = ("--config", str(config), "-o", "json")
    local = json.loads(run_command("what-if", *map(str, places[1:]), *arguments).stdout)
    cluster = Cluster(stack, tmp_path, DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES="0")
    workers = [cluster.worker() for _ in range(3)]
    fifo = segment_path(places[0], 1)
    make_trap(fifo)
    process = run_on(cluster, places, config, stack)
    for _ in range(2):  # with other records, and alone
        kill(reader_of(fifo, workers, stack))
    done = wait_for_end(process)
    assert done.returncode == 0, done.stderr
    assert f"drahealth: record {places[0]}: left out: KilledWorker: " in done.stderr
    document = json.loads(done.stdout)
    assert document["records"][0]["evaluations"] == 0
    assert document["records"][1:] == local["records"]
    assert document["changes"] == local["changes"]


@needs_dask
def test_scheduler_lost_during_the_comparison_is_named_in_one_line(
    stack: ExitStack, tmp_path: Path, config: Path
) -> None:
    places = write_fleet(tmp_path / "fleet")
    cluster = Cluster(stack, tmp_path)
    worker = cluster.worker()
    fifo = segment_path(places[0], 1)
    make_trap(fifo)
    process = run_on(cluster, places, config, stack)
    reader_of(fifo, [worker], stack)
    kill(cluster.scheduler)
    done = wait_for_end(process)
    assert (done.returncode, done.stderr) == (
        70,
        "drahealth: dask cluster: the scheduler was lost; run the command again\n",
    )


def exit_with_refusal(address: str, connect_s: str, workers_s: str) -> None:
    """Print the error of a comparison on a cluster with short limits. Part of a process of its own."""
    what_if_cluster.CONNECT_S = float(connect_s)  # type: ignore[misc]
    what_if_cluster.WORKERS_S = float(workers_s)  # type: ignore[misc]
    with pytest.raises(DrahealthError) as found:
        what_if_cluster.compare_on_cluster(address, [[Path("x")]], replace, lambda _done, _total: None)
    raise SystemExit(f"{type(found.value).__name__}: {found.value}")


def refusal(address: str, *, connect_s: float = PATIENCE_S, workers_s: float = PATIENCE_S) -> str:
    with pytest.raises(AssertionError) as found:
        run_in_own_process(exit_with_refusal, address, connect_s, workers_s)
    return str(found.value)


@needs_dask
def test_unreachable_scheduler_is_named_after_a_bounded_wait() -> None:
    with reserved_port() as port:
        text = refusal(f"tcp://127.0.0.1:{port}", connect_s=0.5)
    assert f"ProbeError: scheduler tcp://127.0.0.1:{port}: no connection: " in text


@needs_dask
@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("localhost", "UsageError: --scheduler: Invalid url scheme."),
        ("http://localhost:1", "UsageError: --scheduler: unknown address scheme 'http'"),
        ("tls://localhost:1", "ConfigError: scheduler tls://localhost:1: dask has no certificates"),
    ],
)
def test_scheduler_that_cannot_be_a_dask_address_is_refused(address: str, text: str) -> None:
    with pytest.raises(DrahealthError) as found:
        what_if_cluster.compare_on_cluster(address, [], replace, lambda _done, _total: None)
    assert f"{type(found.value).__name__}: {found.value}".startswith(text)


@needs_dask
def test_cluster_without_workers_of_this_version_is_refused(stack: ExitStack, tmp_path: Path) -> None:
    cluster = Cluster(stack, tmp_path)
    assert "ProbeError: dask cluster: no worker for 0.5 s; start workers with: " in refusal(
        cluster.address, workers_s=0.5
    )
    (tmp_path / "old/agent").mkdir(parents=True)
    (tmp_path / "old/agent/__init__.py").touch()
    (tmp_path / "old/agent/version.py").write_text('VERSION = "0.0.9"\n')
    worker = cluster.worker(tmp_path / "old", PYTHONPATH="")
    text = refusal(cluster.address)
    assert re.search(r"ConfigError: worker tcp://\S+: has drahealth 0\.0\.9 instead of " + VERSION, text)
    kill(worker)


def test_worker_of_another_version_that_joins_late_is_refused() -> None:
    answer = what_if_cluster.compare_pickled("0.0.9", b"not unpickled")
    assert answer == VERSION
    with pytest.raises(ConfigError, match=rf"a worker has drahealth 0\.0\.9 instead of {VERSION}"):
        what_if_cluster._comparison([Path("x")], "0.0.9")


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["--scheduler", "tcp://localhost:8786"], 78, "--scheduler needs the package distributed; "),
        (
            ["--scheduler", "tcp://localhost:8786", "--jobs", "2"],
            64,
            "--jobs and --scheduler exclude each other",
        ),
        (
            ["memory://fleet/a"],
            78,
            "record memory://fleet/a: URLs need the package fsspec; ",
        ),
    ],
)
def test_cluster_or_url_without_its_extra_is_refused(
    args: list[str],
    code: int,
    text: str,
    tmp_path: Path,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("distributed", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)
    places = write_fleet(tmp_path / "fleet")
    assert main(["what-if", *args, *map(str, places), "--config", str(config)]) == code
    assert text in capsys.readouterr().err


def test_local_records_need_neither_dask_nor_fsspec(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dask", "distributed", "fsspec"):
        monkeypatch.setitem(sys.modules, name, None)
    places = write_fleet(tmp_path / "fleet")
    assert main(["what-if", *map(str, places), "--config", str(config), "--jobs", "1"]) == 0


# --- URLs ---------------------------------------------------------------------------------------------------


@needs_dask
@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_records_at_urls_are_compared_like_files(
    protocol: str, tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsspec

    places = write_fleet(tmp_path / "fleet")
    memory = fsspec.filesystem("memory")
    for path in tmp_path.glob("fleet/*/*"):
        memory.pipe_file(str(path), path.read_bytes())
    arguments = ("--config", str(config), "--jobs", "1", "-o", "json")
    documents = []
    urls = [f"{protocol}://{place}" for place in places]
    for records in (places, urls, [f"{protocol}://{tmp_path}/fleet/*"], [f"{protocol}://{tmp_path}/*/*/*"]):
        assert main(["what-if", *map(str, records), *arguments]) == 0
        out, err = capsys.readouterr()
        assert f"{places[2]}/record-00000001.drahrec: the file is not a drahealth record" in err
        document = json.loads(out)
        del document["elapsedSeconds"]
        documents.append(document)
    assert documents[1:] == 3 * documents[:1]
    assert len(documents[0]["records"]) == 3


@needs_dask
@pytest.mark.parametrize(
    ("url", "code", "text"),
    [
        ("nothing://x/a", 78, "record nothing://x/a: Protocol not known: nothing; name a URL"),
        ("memory://none", 70, "record memory://none: cannot be read: No such file or directory"),
        ("memory://none/*", 70, "record memory://none/*: the URL has no segment file, record-*.drahrec; "),
        (
            "memory://none/record-00000001.drahrec",
            70,
            "1.drahrec: cannot be read: No such file or directory",
        ),
    ],
)
def test_url_without_a_record_is_an_error_that_names_it(
    url: str, code: int, text: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", url, "--config", str(config)]) == code
    assert text in capsys.readouterr().err


@needs_dask
def test_damage_of_a_segment_at_a_url_is_named(tmp_path: Path) -> None:
    import fsspec

    write_segment(segment_path(tmp_path, 1), host_day(1, 5))
    content = segment_path(tmp_path, 1).read_bytes()
    url = f"memory://{tmp_path}/record-00000001.drahrec"
    fsspec.filesystem("memory").pipe_file(f"{tmp_path}/record-00000001.drahrec", content[:-1])
    reader = SegmentReader(UrlPath(url))
    assert list(reader.steps())
    assert reader.problem is not None
    assert reader.problem.size == len(content) - 1
    assert str(reader.problem).startswith(f"{url}: not readable from byte ")


def test_url_of_a_signed_request_has_the_name_without_the_query() -> None:
    url = UrlPath("https://host/node-a/record-00000001.drahrec?signature=a/b")
    assert (url.name, str(url.parent)) == ("record-00000001.drahrec", "https://host/node-a")

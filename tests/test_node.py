"""All sources as one: what they are together before anybody has looked, and how they end. On plain files."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from agents import PlainSysfs, inside_fifos
from patience import PATIENCE_S
from wire.serving import eventually

from agent.config.config import Config
from agent.engine.step import begin, step
from agent.model.source import SourceState
from agent.model.time import NS
from agent.node.node_source import Node
from agent.node.open import open_node, settings_of
from agent.system.clock import read_clocks

DECLARED = "devices.d"
HANGING = (
    "devices/system/cpu/online",
    "devices/system/node/online",
    "bus/pci/devices/0000:5e:00.0/vendor",
)


@pytest.fixture
def sysfs(tmp_path: Path) -> PlainSysfs:
    return PlainSysfs(tmp_path / "sys")


@pytest.fixture
def config(tmp_path: Path, sysfs: PlainSysfs) -> Config:
    for name in ("proc", "cgroup", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "kmsg").touch()
    return Config(
        node_name="n",
        sysfs_root=sysfs.root,
        procfs_root=tmp_path / "proc",
        cgroupfs_root=tmp_path / "cgroup",
        kmsg=tmp_path / "kmsg",
        nvml_library=str(tmp_path / "libnvidia-ml.so.1"),
        runtime_dir=tmp_path / "run",
    )


def opened(config: Config) -> Node:
    return open_node(config, settings_of(config), NS, declares=True)


@pytest.fixture
def node(config: Config) -> Iterator[Node]:
    node = opened(config)
    node.start()
    yield node
    node.stop(1)


def states(node: Node) -> dict[str, SourceState]:
    snapshot = node.read()
    return {source.name: source.state for source in snapshot.sources} if snapshot else {}


def starting(node: Node) -> set[str]:
    return {name for name, state in states(node).items() if state is SourceState.STARTING}


def test_before_it_is_known_what_is_declared_nothing_is_said(node: Node, config: Config) -> None:
    eventually(lambda: starting(node) == {DECLARED}, "all others have looked")
    snapshot = node.read()
    assert snapshot is not None
    assert step(begin(settings_of(config)), snapshot, read_clocks())[1].starting


async def test_that_nobody_declares_anything_is_known_when_the_directory_was_read(node: Node) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.watch)
        with trio.fail_after(PATIENCE_S):
            while starting(node):
                await trio.lowlevel.wait_readable(node.fileno())
                node.clear()
        nursery.cancel_scope.cancel()
    assert states(node)[DECLARED] is SourceState.OK


def test_a_single_look_does_not_ask_what_is_declared(config: Config) -> None:
    node = open_node(config, settings_of(config), NS, declares=False)
    node.start()
    eventually(lambda: states(node) != {} and not starting(node), "all have looked")
    assert DECLARED not in states(node)
    assert node.stop(PATIENCE_S) == []


def test_the_end_waits_for_nobody_who_hangs_and_names_them_all(sysfs: PlainSysfs, config: Config) -> None:
    node, before = opened(config), inside_fifos()
    hung = [sysfs.hang(path).rename(sysfs.root / path.replace("/", "-")) for path in HANGING]
    node.start()
    node.look_at_host()
    eventually(lambda: len(inside_fifos() - before) == len(hung), "all are inside")
    left = node.stop(2)
    for fifo in hung:
        os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))  # lets them go
    assert left == ["the machine's watch", "the sampler", "the look at GPUs' processes"]

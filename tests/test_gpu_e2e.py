"""End-to-end tests outside the scenario table: streams that end during a hang, and the real kernel log."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from agents import (
    HEALTHY,
    LATE_STOP,
    UNHEALTHY,
    play_in_time,
    print_figure,
    short_tmp,
    stream_end,
    wait_for_health,
)
from machine import machine_lock, skip_unless_kernel_log
from scenarios.row import INFO, Row
from scenarios.stage import Stage
from scenarios.steps import wait_for_passes, xid_line

DEVICE = Path("/dev/kmsg")
STALLED = "source.stalled"
GOODBYE = (grpc.StatusCode.UNAVAILABLE, "agent shutting down")
UNKNOWN = 0
HANGING = {"gpu": {"deadline": "1s", "dead": "1m"}}
__all__ = ["short_tmp"]

Stages = Callable[[Row], Stage]


@pytest.fixture
def stages(short_tmp: Path) -> Iterator[Stages]:
    """Begins rows; no agent is left behind."""
    begun: list[Stage] = []

    def begin(row: Row) -> Stage:
        directory = short_tmp / str(len(begun))
        directory.mkdir()
        begun.append(Stage(row, directory))
        begun[-1].start()
        return begun[-1]

    yield begin
    for stage in begun:
        stage.end()


@pytest.mark.parametrize("lock", ["", " lock"], ids=["one GPU", "the whole driver"])
def test_sigterm_during_hang_ends_every_stream_cleanly(stages: Stages, lock: str) -> None:
    def play() -> str:
        stage = stages(Row("a hang", (), gpus=2, settings=HANGING))
        agent = stage.agent
        watchers = agent.kubelet(), agent.kubelet("v1alpha1"), agent.watch_reports()
        with watchers[0] as kubelet, watchers[1] as older, watchers[2] as onlooker:
            onlooker.next()
            stage.machine.fake.send(f"gpu 0 hang nvmlDeviceGetFieldValues{lock}")
            for watcher in (kubelet, older):
                wait_for_health(watcher, "gpu-0", UNKNOWN)
            begun_s = time.monotonic()
            assert agent.end() == 0  # although the call still hangs
            took_s = time.monotonic() - begun_s
            if LATE_STOP not in agent.log:
                assert [stream_end(watcher) for watcher in watchers] == [GOODBYE] * 3
                assert not agent.health_socket.exists()
        print_figure(f"SIGTERM during a hang: {took_s:.2f} s")
        assert "Traceback" not in agent.log
        return agent.log

    play_in_time(play, LATE_STOP)  # the process that hangs in NVML is killed


def test_reload_keeps_gpus_and_latched_faults(stages: Stages) -> None:
    def play() -> str:
        stage = stages(Row("a fault", (), gpus=2, settings={"gpu": {"probation": "1h"}}))
        agent = stage.agent
        with agent.kubelet() as kubelet:
            stage.machine.fake.send("gpu 0 xid 79")
            wait_for_health(kubelet, "gpu-0", UNHEALTHY)
            file = agent.directory / "config.toml"
            rule = '[[rules]]\ncode = "gpu.xid.79"\ndevice = "gpu-1"\noff = true\n'
            file.write_text(f"{file.read_text()}\n{rule}")
            agent.process.send_signal(signal.SIGHUP)
            agent.wait_for_log("configuration: reloaded: rules: [] to ")
            gpus = {"gpu-0": UNHEALTHY, "gpu-1": HEALTHY}
            lists = 0
            while lists < 3:  # the list after the reload, and two heartbeats; others lack GPUs
                devices = kubelet.next().devices
                if any(device.message.startswith(STALLED) for device in devices):
                    return STALLED
                found = {device.device.device_name: device.health for device in devices}
                assert {name: found.get(name, health) for name, health in gpus.items()} == gpus, lists
                lists += gpus.keys() <= found.keys()
        return agent.log

    play_in_time(play, STALLED)


def log_line(code: int) -> None:
    """Write a line about a GPU of an unused PCI domain to the real kernel log."""
    skip_unless_kernel_log(os.O_WRONLY)
    with DEVICE.open("wb", buffering=0) as device:
        device.write(f"{xid_line(code, 'of a test', gpu=15)}\n".encode())


def test_real_kernel_log_line_is_read_if_any_facility_is_accepted(stages: Stages) -> None:
    code = 400 + os.getpid() % 500  # that no table has; the log still holds those of runs before
    with machine_lock():
        believing = stages(Row("", (), gpus=16, flags=("--kmsg", str(DEVICE), "--kmsg-any-facility")))
        sober = stages(Row("", (), gpus=16, flags=("--kmsg", str(DEVICE))))
        log_line(code)
        believing.clients.know(["gpu-15"], INFO, f"gpu.xid.{code}: ")
    sober.perform(wait_for_passes(5, "gpu-15"))
    sober.clients.never("gpu.xid.")

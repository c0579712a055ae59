"""A driver that finds what a test tells it to: ``sick_driver KUBELET_DIR CLAIMS FATES [at-once]``.

Nobody but it knows its devices, and its check holds all of them healthy. What befalls a claim stands in a
file, FATES, which is read with each call: ``{claim: [word, ...]}``, the words of :data:`RAISED`; ``*`` is any
claim, ``un<claim>`` the unprepare of one. With ``at-once`` it prepares all claims of a call at the same time.
It writes what it does as lines of JSON to its output.
"""

import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from hostdev_driver.claims import ClaimFiles

import agent

DRIVER: Final = "sick.example.com"
NODE: Final = "node-1"
DEVICES: Final = tuple(f"thing-{number}" for number in range(4))
EVERYBODY: Final = "*"
HOUR_S: Final = 3600.0
"""Longer than a call may last, so that nothing is tried again within it [s]."""


class Odd(Exception):
    """An exception that nobody has heard of."""


def busy(text: str) -> Exception:
    return agent.TransientError(text, retry_after_s=HOUR_S)


def broken(device: str, text: str) -> Exception:
    return agent.FailedDevice(device, text, code="thing.broken")


RAISED: Final[Mapping[str, Callable[..., Exception]]] = {
    "odd": Odd,
    "busy": busy,
    "broken": broken,
    "bad": agent.BadConfig,
    "permanent": agent.PermanentError,
}


def say(what: str, **more: object) -> None:
    sys.stdout.write(json.dumps({"what": what, **more}) + "\n")
    sys.stdout.flush()


class Sick:
    """Prepares what it is not told to find broken."""

    def __init__(self, monitor: agent.Monitor, state: Path, fates: Path) -> None:
        self._monitor = monitor
        self._state = state
        self._fates = fates
        self._classified = agent.classified(monitor)(self._prepare)

    def prepare(self, claim: agent.Claim) -> list[agent.PreparedDevice]:
        """Says what anybody can know in the moment in which a broken device is on its way to the kubelet."""
        try:
            return self._classified(claim)
        except agent.PrepareError as error:
            if error.verdict.error_class is agent.ErrorClass.FAILED_DEVICE:
                self._say_known(error.verdict)
            raise

    def _say_known(self, verdict: agent.PrepareVerdict) -> None:
        known = map(self._monitor.health_of, verdict.devices)
        say(
            "broken",
            claim=verdict.claim.name,
            kept=verdict.summary in (self._state / "prepares.json").read_text(),
            health=[str(one and one.health.name) for one in known],
            tainted=tainted(self._monitor.taints),
        )

    def _prepare(self, claim: agent.Claim) -> list[agent.PreparedDevice]:
        say("prepare", claim=claim.name)
        self._befall(claim.name, EVERYBODY)
        return [
            agent.PreparedDevice(
                (one.request,), one.pool, one.device, (f"{DRIVER}/thing={claim.uid}-{one.device}",)
            )
            for one in claim.devices
        ]

    def unprepare(self, ref: agent.ClaimRef) -> None:
        say("unprepare", claim=ref.name)
        self._befall(f"un{ref.name}")

    def _befall(self, *keys: str) -> None:
        fates = json.loads(self._fates.read_bytes()) if self._fates.exists() else {}
        for key in keys:
            if key in fates:
                word, *more = fates[key]
                raise RAISED[word](*more)


def tainted(taints: agent.Taints) -> dict[str, list[dict[str, str]]]:
    """Those that have any, as their ResourceSlice would say it."""
    return {ref.device: agent.as_objects(some) for ref, some in taints.devices.items() if some}


def healthy(device: agent.Device) -> bool:
    return True


def main(arguments: list[str]) -> None:
    kubelet, claims, fates = map(Path, arguments[:3])
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    state = kubelet / "plugins" / DRIVER / "drahealth"
    monitor = agent.Monitor(
        DRIVER, hardware=False, state_dir=state, config=agent.Config(node_name=NODE), on_error=failed
    )
    monitor.add(*map(agent.Device, DEVICES))
    monitor.check(every=0.2, timeout=5)(healthy)
    monitor.on_taints(lambda taints: say("taints", tainted=tainted(taints)))
    sick = Sick(monitor, state, fates)
    server = agent.PluginServer(
        monitor,
        sick,
        claims=ClaimFiles(claims, DRIVER),
        kubelet_dir=kubelet,
        serialize=arguments[3:] != ["at-once"],
        on_error=failed,
    )
    with monitor, server:
        stop.wait()


def failed(error: BaseException) -> None:
    """A log with a traceback fails the test."""
    logging.error("ended", exc_info=error)


if __name__ == "__main__":
    main(sys.argv[1:])

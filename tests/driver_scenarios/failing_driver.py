"""A driver that fails on request: ``failing_driver KUBELET_DIR CLAIMS FATES [at-once]``.

Only the driver knows its devices, and its check reports all of them healthy. The file FATES, read at each
call, has the failure of each claim: ``{claim: [kind, ...]}`` with the kinds of :data:`RAISED`; ``*`` is any
claim, ``un<claim>`` the unprepare of one. With ``at-once`` the driver prepares all claims of a call
concurrently. It writes its actions as lines of JSON to its output.
"""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from hostdev_driver.claims import ClaimFiles
from patience import PATIENCE_S

import drahealth

DRIVER: Final = "sick.example.com"
NODE: Final = "node-1"
DEVICES: Final = tuple(f"thing-{number}" for number in range(4))
ANY_CLAIM: Final = "*"
HOUR_S: Final = 3600.0
"""Longer than a call may last, so that there is no retry within the call [s]."""


class Odd(Exception):
    """Exception of an unknown type."""


def busy_error(text: str) -> Exception:
    return drahealth.TransientError(text, retry_after_s=HOUR_S)


def broken_device_error(device: str, text: str) -> Exception:
    return drahealth.FailedDeviceError(device, text, code="thing.broken")


RAISED: Final[Mapping[str, Callable[..., Exception]]] = {
    "odd": Odd,
    "busy": busy_error,
    "broken": broken_device_error,
    "bad": drahealth.BadConfigError,
    "permanent": drahealth.PermanentError,
}


def write_record(what: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"what": what, **fields}) + "\n")
    sys.stdout.flush()


class FailingDriver:
    """Driver that fails claims as the file FATES says."""

    def __init__(self, monitor: drahealth.Monitor, state: Path, fates: Path) -> None:
        self._monitor = monitor
        self._state = state
        self._fates = fates
        self._classified = drahealth.classified(monitor)(self._prepare)

    def prepare(self, claim: drahealth.Claim) -> list[drahealth.PreparedDevice]:
        """Prepare, and record the state of a broken device before the kubelet gets the error."""
        try:
            return self._classified(claim)
        except drahealth.PrepareError as error:
            if error.verdict.error_class is drahealth.ErrorClass.FAILED_DEVICE:
                self._record_broken(error.verdict)
            raise

    def _record_broken(self, verdict: drahealth.PrepareVerdict) -> None:
        known = map(self._monitor.health_of, verdict.devices)
        write_record(
            "broken",
            claim=verdict.claim.name,
            kept=verdict.summary in (self._state / "prepares.json").read_text(),
            health=[str(device and device.health.name) for device in known],
            tainted=taints_by_device(self._monitor.taints),
        )

    def _prepare(self, claim: drahealth.Claim) -> list[drahealth.PreparedDevice]:
        write_record("prepare", claim=claim.name)
        self._fail_on_request(claim.name, ANY_CLAIM)
        return [
            drahealth.PreparedDevice(
                requests=(device.request,),
                pool=device.pool,
                device=device.device,
                cdi_ids=(f"{DRIVER}/thing={claim.uid}-{device.device}",),
            )
            for device in claim.devices
        ]

    def unprepare(self, ref: drahealth.ClaimRef) -> None:
        write_record("unprepare", claim=ref.name)
        self._fail_on_request(f"un{ref.name}")

    def _fail_on_request(self, *keys: str) -> None:
        fates = json.loads(self._fates.read_bytes()) if self._fates.exists() else {}
        for key in keys:
            if key in fates:
                kind, *arguments = fates[key]
                raise RAISED[kind](*arguments)


def taints_by_device(taints: drahealth.Taints) -> dict[str, list[dict[str, str]]]:
    """Return the taints of tainted devices in the format of a ResourceSlice."""
    return {ref.device: drahealth.taint_objects(some) for ref, some in taints.devices.items() if some}


def healthy(device: drahealth.Device) -> bool:
    return True


def main(arguments: list[str]) -> None:
    kubelet, claims, fates = map(Path, arguments[:3])
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    state = kubelet / "plugins" / DRIVER / "drahealth"
    monitor = drahealth.Monitor(
        DRIVER,
        hardware=False,
        state_dir=state,
        config=drahealth.Config(node_name=NODE, taint_wait_s=10.0),
        on_error=log_failure,
    )
    monitor.add(*map(drahealth.Device, DEVICES))
    monitor.check(every_s=0.2, timeout_s=PATIENCE_S)(healthy)
    monitor.on_taints(lambda taints: write_record("taints", tainted=taints_by_device(taints)))
    failing = FailingDriver(monitor, state, fates)
    server = drahealth.PluginServer(
        monitor,
        failing,
        get_claim=ClaimFiles(claims, DRIVER),
        kubelet_dir=kubelet,
        serialize=arguments[3:] != ["at-once"],
        on_error=log_failure,
    )
    server.run()


def log_failure(error: BaseException) -> None:
    """Log the error with its traceback, which fails the test."""
    logging.error("ended", exc_info=error)


if __name__ == "__main__":
    main(sys.argv[1:])

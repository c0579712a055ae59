"""A DRA driver of plain threads: ``python threaded_driver.py DIRECTORY``.

It offers hugepages, which drahealth monitors. Claims are files instead of objects of the API server;
``config.toml`` has the node's name, and whatever else is not as it is on most nodes.
"""

import json
import logging
import sys
from pathlib import Path

import drahealth

NAME = "pages.example.com"


class Pages:
    def __init__(self, root: Path, monitor: drahealth.Monitor) -> None:
        self.root, self.monitor = root, monitor

    def claim(self, ref: drahealth.ClaimRef) -> drahealth.Claim:
        text = (self.root / "claims" / f"{ref.name}.json").read_text()
        return drahealth.parse_claim(json.loads(text), NAME, ref)

    def prepare(self, claim: drahealth.Claim) -> list[drahealth.PreparedDevice]:
        for device in claim.devices:
            self.monitor.require_healthy(device)
        with drahealth.doing(drahealth.Operation.STATE, self.root / "held"):
            (self.root / "held" / claim.uid).write_text(claim.name)
        return [
            drahealth.PreparedDevice(requests=(device.request,), pool=device.pool, device=device.device)
            for device in claim.devices
        ]

    def unprepare(self, ref: drahealth.ClaimRef) -> None:
        (self.root / "held" / ref.uid).unlink(missing_ok=True)


def publish(taints: drahealth.Taints) -> None:
    for device, of_it in taints.devices.items():
        logging.info("%s has %s", device.device, drahealth.taint_objects(of_it) or "no taint")


def build(root: Path) -> tuple[drahealth.Monitor, drahealth.PluginServer]:
    monitor = drahealth.Monitor(NAME, config=drahealth.read_config(root / "config.toml"), kubelet_dir=root)
    monitor.add(drahealth.Device("pages-0", drahealth.Hugepages("2Mi", pages=8, numa=0)))
    monitor.on_taints(publish)
    pages = Pages(root, monitor)
    return monitor, drahealth.PluginServer(monitor, pages, get_claim=pages.claim)


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    _, server = build(Path(sys.argv[1]))
    server.run()

"""A DRA driver of plain threads: ``python threaded_driver.py DIRECTORY``.

It offers hugepages, which drahealth monitors. Claims are files instead of objects of the API server;
``config.toml`` has the node's name, and whatever else is not as it is on most nodes.
"""

import json
import logging
import signal
import sys
import threading
from pathlib import Path

import agent

NAME = "pages.example.com"


class Pages:
    def __init__(self, root: Path, monitor: agent.Monitor) -> None:
        self.root, self.monitor = root, monitor

    def claim(self, ref: agent.ClaimRef) -> agent.Claim:
        text = (self.root / "claims" / f"{ref.name}.json").read_text()
        return agent.parse_claim(json.loads(text), NAME, ref)

    def prepare(self, claim: agent.Claim) -> list[agent.PreparedDevice]:
        for device in claim.devices:
            self.monitor.require_healthy(device)
        with agent.doing(agent.Operation.STATE, self.root / "held"):
            (self.root / "held" / claim.uid).write_text(claim.name)
        return [agent.PreparedDevice((one.request,), one.pool, one.device) for one in claim.devices]

    def unprepare(self, ref: agent.ClaimRef) -> None:
        (self.root / "held" / ref.uid).unlink(missing_ok=True)


def publish(taints: agent.Taints) -> None:
    for device, of_it in taints.devices.items():
        logging.info("%s has %s", device.device, agent.as_objects(of_it) or "no taint")


def run(root: Path, stop: threading.Event) -> None:
    monitor = agent.Monitor(NAME, config=agent.read_config(root / "config.toml"), kubelet_dir=root)
    monitor.add(agent.Device("pages-0", agent.Hugepages("2Mi", pages=8, numa=0)))
    monitor.on_taints(publish)
    pages = Pages(root, monitor)
    with monitor, agent.PluginServer(monitor, pages, claims=pages.claim):
        stop.wait()


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    run(Path(sys.argv[1]), ended)

"""A DRA driver that is an asyncio program: ``NODE_NAME=node-1 python asyncio_driver.py DIRECTORY``.

A card is a file with the state of its link. A claim may request to flash a card; that blocks the loop.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import drahealth

NAME = "card.example.com"


class CardParameters(drahealth.Parameters, frozen=True):
    flash_s: float = 0

    def __post_init__(self) -> None:
        if not 0 <= self.flash_s <= 40:
            raise ValueError(f"flash_s {self.flash_s:g} is not within 0 and 40")


class Cards:
    def __init__(self, root: Path) -> None:
        self.root = root

    def claim(self, ref: drahealth.ClaimRef) -> drahealth.Claim:
        text = (self.root / "claims" / f"{ref.name}.json").read_text()
        return drahealth.parse_claim(json.loads(text), NAME, ref)

    async def prepare(self, claim: drahealth.Claim) -> list[drahealth.PreparedDevice]:
        for config in claim.configs:
            parameters = drahealth.decode_parameters(config, {f"{NAME}/v1/CardParameters": CardParameters})
            time.sleep(parameters.flash_s)  # noqa: ASYNC251, RUF100  # it holds up this loop, and no health
        return [
            drahealth.PreparedDevice(requests=(device.request,), pool=device.pool, device=device.device)
            for device in claim.devices
        ]

    async def unprepare(self, ref: drahealth.ClaimRef) -> None:
        await asyncio.sleep(0)


async def main(root: Path) -> None:
    config = drahealth.Config(node_name=os.environ["NODE_NAME"])
    monitor = drahealth.Monitor(NAME, config=config, hardware=False, kubelet_dir=root)
    monitor.add(drahealth.Device("card-0"), drahealth.Device("card-1"))

    @monitor.check(every_s=0.5, timeout_s=5, devices="card-*")
    def link(device: drahealth.Device) -> drahealth.Finding | None:
        text = (root / device.name).read_text().strip()
        return None if text == "up" else drahealth.unhealthy("card.link", f"link is {text}, not up")

    stop, cards = asyncio.Event(), Cards(root)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with monitor, drahealth.PluginServer(monitor, cards, get_claim=cards.claim):
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

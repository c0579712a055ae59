"""A DRA driver that is a Trio program: ``NODE_NAME=node-1 python trio_driver.py DIRECTORY``.

A card is a file that says how its link is. Claims are files, too, where other drivers ask the API server.
"""

import json
import os
import signal
import sys
from pathlib import Path

import trio

import drahealth

NAME = "card.example.com"


class Cards:
    def __init__(self, root: Path) -> None:
        self.root = root

    async def claim(self, ref: drahealth.ClaimRef) -> drahealth.Claim:
        text = await trio.Path(self.root, "claims", f"{ref.name}.json").read_text()
        return drahealth.parse_claim(json.loads(text), NAME, ref)

    async def prepare(self, claim: drahealth.Claim) -> list[drahealth.PreparedDevice]:
        cards = [drahealth.CdiDevice(device.device, env={"CARD": device.device}) for device in claim.devices]
        write, directory = drahealth.write_cdi_spec, self.root / "cdi"
        ids = await trio.to_thread.run_sync(write, directory, f"{NAME}/card", claim.uid, cards)
        return [
            drahealth.PreparedDevice(
                requests=(device.request,),
                pool=device.pool,
                device=device.device,
                cdi_ids=(id_,),
            )
            for device, id_ in zip(claim.devices, ids, strict=True)
        ]

    async def unprepare(self, ref: drahealth.ClaimRef) -> None:
        await trio.to_thread.run_sync(drahealth.remove_cdi_spec, self.root / "cdi", f"{NAME}/card", ref.uid)

    async def link(self, device: drahealth.Device) -> drahealth.Finding | None:
        link = (await trio.Path(self.root, device.name).read_text()).strip()
        return None if link == "up" else drahealth.unhealthy("card.link", f"link is {link}, not up")


async def run(root: Path) -> None:
    config = drahealth.Config(node_name=os.environ["NODE_NAME"])
    monitor = drahealth.Monitor(NAME, config=config, hardware=False, kubelet_dir=root)
    monitor.add(drahealth.Device("card-0"), drahealth.Device("card-1"))
    cards = Cards(root)
    monitor.check(every_s=0.5, timeout_s=5)(cards.link)
    async with monitor, drahealth.PluginServer(monitor, cards, get_claim=cards.claim):
        await trio.sleep_forever()


async def main(root: Path) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, root)
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]))

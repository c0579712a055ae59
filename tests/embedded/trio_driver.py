"""A DRA driver that is a Trio program: ``NODE_NAME=node-1 python trio_driver.py DIRECTORY``.

A card is a file that says how its link is. Claims are files, too, where other drivers ask the API server.
"""

import json
import os
import signal
import sys
from pathlib import Path

import trio

import agent

NAME = "card.example.com"


class Cards:
    def __init__(self, root: Path) -> None:
        self.root = root

    async def claim(self, ref: agent.ClaimRef) -> agent.Claim:
        text = await trio.Path(self.root, "claims", f"{ref.name}.json").read_text()
        return agent.parse_claim(json.loads(text), NAME, ref)

    async def prepare(self, claim: agent.Claim) -> list[agent.PreparedDevice]:
        cards = [agent.CdiDevice(one.device, env={"CARD": one.device}) for one in claim.devices]
        kind = f"{NAME}/card"
        ids = await trio.to_thread.run_sync(agent.write_spec, self.root / "cdi", kind, claim.uid, cards)
        given = zip(claim.devices, ids, strict=True)
        return [agent.PreparedDevice((one.request,), one.pool, one.device, (id_,)) for one, id_ in given]

    async def unprepare(self, ref: agent.ClaimRef) -> None:
        await trio.to_thread.run_sync(agent.remove_spec, self.root / "cdi", f"{NAME}/card", ref.uid)

    async def link(self, device: agent.Device) -> agent.Finding | None:
        link = (await trio.Path(self.root, device.name).read_text()).strip()
        return None if link == "up" else agent.unhealthy("card.link", f"link is {link}, not up")


async def run(root: Path) -> None:
    config = agent.Config(node_name=os.environ["NODE_NAME"])
    monitor = agent.Monitor(NAME, config=config, hardware=False, kubelet_dir=root)
    monitor.add(agent.Device("card-0"), agent.Device("card-1"))
    cards = Cards(root)
    monitor.check(every=0.5, timeout=5)(cards.link)
    async with monitor, agent.PluginServer(monitor, cards, claims=cards.claim):
        await trio.sleep_forever()


async def main(root: Path) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, root)
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]))

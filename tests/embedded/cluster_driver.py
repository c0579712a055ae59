"""A DRA driver of plain threads with all its work at the API server: ``python cluster_driver.py DIRECTORY``.

Its devices are files of the directory, which stands for the kubelet's. It reads claims, publishes
ResourceSlices with taints, and ends on SIGTERM.
"""

import logging
import os
import sys
from pathlib import Path

import drahealth

NAME = "card.example.com"


class Cards:
    def __init__(self, root: Path) -> None:
        self.root, self.cdi = root, root / "cdi"

    def link(self, device: drahealth.Device) -> drahealth.Finding | None:
        text = (self.root / device.name).read_text().strip()
        return None if text == "up" else drahealth.unhealthy("card.link", f"link is {text}, not up")

    def prepare(self, claim: drahealth.Claim) -> list[drahealth.PreparedDevice]:
        for device in claim.devices:
            if self.link(drahealth.Device(device.device)):
                raise drahealth.FailedDeviceError(device, "link is not up", code="card.link")
        cards = [drahealth.CdiDevice(device.device, env={"CARD": device.device}) for device in claim.devices]
        ids = drahealth.write_cdi_spec(self.cdi, f"{NAME}/card", claim.uid, cards)
        return [
            drahealth.PreparedDevice(
                requests=(device.request,), pool=device.pool, device=device.device, cdi_ids=(id_,)
            )
            for device, id_ in zip(claim.devices, ids, strict=True)
        ]

    def unprepare(self, ref: drahealth.ClaimRef) -> None:
        drahealth.remove_cdi_spec(self.cdi, f"{NAME}/card", ref.uid)


def build(root: Path) -> tuple[drahealth.SlicePublisher, drahealth.PluginServer]:
    config = drahealth.Config(node_name=os.environ["NODE_NAME"])
    monitor = drahealth.Monitor(NAME, config=config, hardware=False, kubelet_dir=root)
    cards = Cards(root)
    names = sorted(path.name for path in root.glob("card-*"))
    monitor.add(*map(drahealth.Device, names))
    monitor.check(every_s=0.5, timeout_s=5)(cards.link)
    api = drahealth.ApiServer(drahealth.find_api_access())
    slices = drahealth.SlicePublisher(api, monitor, [drahealth.SliceDevice(name) for name in names])
    return slices, drahealth.PluginServer(monitor, cards, get_claim=drahealth.ClaimReader(api, NAME))


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    slices, server = build(Path(sys.argv[1]))
    with slices:
        server.run()

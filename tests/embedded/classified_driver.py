"""A prepare handler and nothing else: ``NODE_NAME=node-1 python classified_driver.py DIRECTORY CLAIM...``

It prepares each claim, which is a file, and prints the text for the kubelet.
"""

import json
import os
import sys
from pathlib import Path

import drahealth

NAME, ROOT = "card.example.com", Path(sys.argv[1])
config = drahealth.Config(node_name=os.environ["NODE_NAME"])
monitor = drahealth.Monitor(NAME, version="1.4", config=config, hardware=False, kubelet_dir=ROOT)
monitor.add(drahealth.Device("card-0"), drahealth.Device("card-1"))


@drahealth.classified(monitor)
def prepare(claim: drahealth.Claim) -> None:
    for device in claim.devices:
        with drahealth.doing(drahealth.Operation.DEVICE, device.device):
            link = (ROOT / device.device).read_text().strip()
        if link == "training":
            raise drahealth.TransientError("link is still training", code="card.training", retry_after_s=60)
        if link != "up":
            raise drahealth.FailedDeviceError(device, f"link is {link}, not up", code="card.link")
    if claim.configs:
        raise drahealth.BadConfigError(f"cards have no parameters, the claim has {len(claim.configs)}")


def main(names: list[str]) -> None:
    with monitor:
        monitor.wait_ready(10)
        for name in names:
            obj = json.loads((ROOT / "claims" / f"{name}.json").read_text())
            try:
                prepare(drahealth.parse_claim(obj, NAME))
            except drahealth.PrepareError as error:
                sys.stdout.write(f"{name}: {error.text}\n")


if __name__ == "__main__":
    main(sys.argv[2:])

"""A DRA driver with a grpclib server of its own: ``NODE_NAME=node-1 python own_server_driver.py DIRECTORY``.

``dra`` and ``plugin_registration`` are made from the kubelet's .proto files by protoc with grpclib's plugin.
From drahealth come the health service, its codec, and the classification of what ``prepare`` raises.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from dra.v1 import dra_v1_grpc as dra_grpc
from dra.v1 import dra_v1_pb2 as dra
from grpclib.server import Server, Stream
from plugin_registration.v1 import plugin_registration_v1_grpc as registration_grpc
from plugin_registration.v1 import plugin_registration_v1_pb2 as registration

import drahealth

NAME, ROOT = "card.example.com", Path(sys.argv[1])
config = drahealth.Config(node_name=os.environ["NODE_NAME"])
monitor = drahealth.Monitor(NAME, config=config, hardware=False, kubelet_dir=ROOT)
monitor.add(drahealth.Device("card-0"))


@monitor.check(every_s=0.5, timeout_s=5)
def link(device: drahealth.Device) -> drahealth.Finding | None:
    text = (ROOT / device.name).read_text().strip()
    return None if text == "up" else drahealth.unhealthy("card.link", f"link is {text}, not up")


@drahealth.classified(monitor)
async def prepare(claim: drahealth.Claim) -> list[dra.Device]:
    if claim.configs:
        raise drahealth.BadConfigError(f"cards have no parameters, the claim has {len(claim.configs)}")
    given = claim.devices
    return [dra.Device(request_names=[d.request], pool_name=d.pool, device_name=d.device) for d in given]


class Plugin(dra_grpc.DRAPluginBase):
    async def NodePrepareResources(self, stream: Stream) -> None:
        response = dra.NodePrepareResourcesResponse()
        claims = (await stream.recv_message()).claims
        await asyncio.gather(*(self.prepare(claim, response.claims[claim.uid]) for claim in claims))
        await stream.send_message(response)

    async def prepare(self, ref: dra.Claim, answer: dra.NodePrepareResourceResponse) -> None:
        try:
            obj = json.loads((ROOT / "claims" / f"{ref.name}.json").read_text())
            claim = drahealth.parse_claim(obj, NAME, drahealth.ClaimRef(ref.namespace, ref.name, ref.uid))
            answer.devices.extend(await prepare(claim))
        except drahealth.PrepareError as error:
            answer.error = error.text
        except Exception as error:  # there is no such claim now; the others of the call are not to blame
            answer.error = f"{type(error).__name__}: {error}"

    async def NodeUnprepareResources(self, stream: Stream) -> None:
        response = dra.NodeUnprepareResourcesResponse()
        for claim in (await stream.recv_message()).claims:
            monitor.tracker.unprepared(drahealth.ClaimRef(claim.namespace, claim.name, claim.uid))
            response.claims[claim.uid].SetInParent()
        await stream.send_message(response)


class Registration(registration_grpc.RegistrationBase):
    async def GetInfo(self, stream: Stream) -> None:
        await stream.recv_message()
        versions = ["v1.DRAPlugin", *monitor.supported_services]
        info = registration.PluginInfo(type="DRAPlugin", name=NAME, supported_versions=versions)
        await stream.send_message(info)

    async def NotifyRegistrationStatus(self, stream: Stream) -> None:
        await stream.recv_message()
        await stream.send_message(registration.RegistrationStatusResponse())


async def main() -> None:
    server = Server([Plugin(), Registration(), monitor.health_service()], codec=monitor.codec)
    async with monitor:
        await server.start(path=str(ROOT / "plugins_registry" / f"{NAME}-reg.sock"))
        await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(main())

"""Which containers have CPUs for themselves from a driver: of its declaration and of who uses what.

The kubelet sees nothing of such CPUs. Those that it gave itself are in agent.sources.cpu_manager.
"""

from collections import defaultdict
from collections.abc import Mapping

from agent.devices.consumers.affected import affected
from agent.model.claim import DeviceRef
from agent.model.consumers import Affected, ConsumerMap, DeviceEdge
from agent.model.cpuset import CpuSet
from agent.model.declared import Declarations, DeclaredCpus


def own_cpus(known: ConsumerMap, declared: Declarations) -> Mapping[str, Mapping[str, CpuSet]]:
    """CPUs by the pod's UID, as the kubelet has it, and the container's name.

    Only of devices that are declared exclusive and were prepared for the pod on this node. A container is
    left out if it may have more or fewer CPUs than that: of a device that is not exclusive, a part of one, or
    one of a claim of which nobody says what the container names.
    """
    own: dict[str, dict[str, CpuSet]] = defaultdict(dict)
    unclear: set[tuple[str, str]] = set()
    for device in (one for file in declared for one in file.devices):
        if not isinstance(device.what, DeclaredCpus):
            continue
        for user in affected(known, DeviceRef(device.driver, device.pool, device.name)):
            if not user.sure:
                continue
            is_whole = device.what.exclusive and not _is_share(user)
            of_pod = own[user.pod.ref.uid]
            for container in user.containers:
                if is_whole and container.sure:
                    of_pod[container.name] = of_pod.get(container.name, 0) | device.what.cpus
                else:
                    unclear.add((user.pod.ref.uid, container.name))
    return {
        uid: clear
        for uid, containers in own.items()
        if (clear := {name: cpus for name, cpus in containers.items() if (uid, name) not in unclear})
    }


def _is_share(user: Affected) -> bool:
    """Whether its claim has the device with others, each a part of it."""
    return any(isinstance(edge, DeviceEdge) and edge.use.share_id for edge in user.edges)

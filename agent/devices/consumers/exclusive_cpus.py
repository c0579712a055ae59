"""Exclusive CPUs that DRA drivers give to containers, from the drivers' declarations and the consumer map.

The kubelet's own CPU manager does not know these CPUs.
"""

from collections import defaultdict
from collections.abc import Mapping

from agent.devices.consumers.consumer_queries import affected_pods
from agent.model.claim import DeviceRef
from agent.model.consumers import AffectedPod, ConsumerMap, DeviceEdge
from agent.model.cpuset import CpuSet
from agent.model.declared_devices import Declarations, DeclaredCpuDevice


def exclusive_cpus(known: ConsumerMap, declared: Declarations) -> Mapping[str, Mapping[str, CpuSet]]:
    """Return the exclusive CPUs of containers, by pod UID and container name.

    They are the CPUs of devices that are declared exclusive and prepared for the pod on this node. A
    container that may also have other CPUs is left out.
    """
    own: dict[str, dict[str, CpuSet]] = defaultdict(dict)
    unclear: set[tuple[str, str]] = set()
    for device in (one for file in declared for one in file.devices):
        if not isinstance(device.part, DeclaredCpuDevice):
            continue
        for user in affected_pods(known, DeviceRef(device.driver, device.pool, device.name)):
            if not user.is_certain:
                continue
            is_whole = device.part.exclusive and not _is_share(user)
            of_pod = own[user.pod.ref.uid]
            for container in user.containers:
                if is_whole and container.is_certain:
                    of_pod[container.name] = of_pod.get(container.name, 0) | device.part.cpus
                else:
                    unclear.add((user.pod.ref.uid, container.name))
    return {
        uid: clear
        for uid, containers in own.items()
        if (clear := {name: cpus for name, cpus in containers.items() if (uid, name) not in unclear})
    }


def _is_share(user: AffectedPod) -> bool:
    return any(isinstance(edge, DeviceEdge) and edge.use.share_id for edge in user.edges)

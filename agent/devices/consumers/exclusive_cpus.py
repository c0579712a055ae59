"""Exclusive CPUs that drivers assign to containers, from declarations and the consumer map.

The kubelet does not see these CPUs. CPUs of its own CPU manager are read by agent.sources.kubelet_state.
"""

from collections import defaultdict
from collections.abc import Mapping

from agent.devices.consumers.affected import affected
from agent.model.claim import DeviceRef
from agent.model.consumers import Affected, ConsumerMap, DeviceEdge
from agent.model.cpuset import CpuSet
from agent.model.declared import Declarations, DeclaredCpus


def exclusive_cpus(known: ConsumerMap, declared: Declarations) -> Mapping[str, Mapping[str, CpuSet]]:
    """Return the exclusive CPUs of containers by pod UID (as the kubelet uses it) and container name.

    Only devices that are declared exclusive and prepared for the pod on this node count. A container is left
    out if it can have other CPUs: of a device that is not exclusive, of a share, or of a claim whose requests
    in the container are unknown.
    """
    own: dict[str, dict[str, CpuSet]] = defaultdict(dict)
    unclear: set[tuple[str, str]] = set()
    for device in (one for file in declared for one in file.devices):
        if not isinstance(device.part, DeclaredCpus):
            continue
        for user in affected(known, DeviceRef(device.driver, device.pool, device.name)):
            if not user.sure:
                continue
            is_whole = device.part.exclusive and not _is_share(user)
            of_pod = own[user.pod.ref.uid]
            for container in user.containers:
                if is_whole and container.sure:
                    of_pod[container.name] = of_pod.get(container.name, 0) | device.part.cpus
                else:
                    unclear.add((user.pod.ref.uid, container.name))
    return {
        uid: clear
        for uid, containers in own.items()
        if (clear := {name: cpus for name, cpus in containers.items() if (uid, name) not in unclear})
    }


def _is_share(user: Affected) -> bool:
    """Return whether the claim of an affected pod has only a share of the device."""
    return any(isinstance(edge, DeviceEdge) and edge.use.share_id for edge in user.edges)

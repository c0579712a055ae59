"""v1.Pod in protobuf, as the kubelet's pods API gives it, to the object that kubectl shows of it.

Only what says who uses which claim, what a pod is to get of CPU, memory and hugepages, and how it is doing.

Source: ``core/v1/generated.proto`` of k8s.io/api and ``meta/v1/generated.proto`` of k8s.io/apimachinery, 0.36
and 0.37. Field 3 of a node-allocatable status is 1.36's, 4 and 5 are 1.37's.
"""

from collections.abc import Mapping
from typing import Final

from agent.serve.grpc.wire.shapes import Kind, Part, Shape, read_shape

_OWNER: Final[Shape] = {
    1: Part("kind"),
    3: Part("name"),
    4: Part("uid"),
    5: Part("apiVersion"),
    6: Part("controller", Kind.SWITCH),
}
_METADATA: Final[Shape] = {
    1: Part("name"),
    3: Part("namespace"),
    5: Part("uid"),
    8: Part("creationTimestamp", Kind.TIME),
    9: Part("deletionTimestamp", Kind.TIME),
    11: Part("labels", keyed=True),
    12: Part("annotations", keyed=True),
    13: Part("ownerReferences", _OWNER, many=True),
}
_RESOURCES: Final[Shape] = {
    1: Part("limits", Kind.QUANTITY, keyed=True),
    2: Part("requests", Kind.QUANTITY, keyed=True),
    3: Part("claims", {1: Part("name"), 2: Part("request")}, many=True),
}
_CONTAINER: Final[Shape] = {
    1: Part("name"),
    8: Part("resources", _RESOURCES),
    24: Part("restartPolicy"),
}
_SPEC: Final[Shape] = {
    2: Part("containers", _CONTAINER, many=True),
    10: Part("nodeName"),
    20: Part("initContainers", _CONTAINER, many=True),
    32: Part("overhead", Kind.QUANTITY, keyed=True),
    39: Part(
        "resourceClaims",
        {1: Part("name"), 3: Part("resourceClaimName"), 4: Part("resourceClaimTemplateName")},
        many=True,
    ),
    40: Part("resources", _RESOURCES),
    43: Part("schedulingGroup", {1: Part("podGroupName")}),
}
_STATE: Final[Shape] = {
    1: Part("waiting", {1: Part("reason")}),
    2: Part("running", {1: Part("startedAt", Kind.TIME)}),
    3: Part("terminated", {1: Part("exitCode", Kind.NUMBER), 3: Part("reason")}),
}
_CONTAINER_STATUS: Final[Shape] = {
    1: Part("name"),
    2: Part("state", _STATE),
    8: Part("containerID"),
    10: Part("allocatedResources", Kind.QUANTITY, keyed=True),
    11: Part("resources", _RESOURCES),
}
_EXTENDED: Final[Shape] = {
    1: Part(
        "requestMappings",
        {1: Part("containerName"), 2: Part("resourceName"), 3: Part("requestName")},
        many=True,
    ),
    2: Part("resourceClaimName"),
}
_NODE_ALLOCATABLE: Final[Shape] = {
    1: Part("resourceClaimName"),
    2: Part("containers", many=True),
    3: Part("resources", Kind.QUANTITY, keyed=True),
    4: Part("mapping", {1: Part("name"), 2: Part("quantity", Kind.QUANTITY)}, many=True),
    5: Part(
        "overhead",
        {1: Part("name"), 2: Part("perPod", Kind.QUANTITY), 3: Part("perContainer", Kind.QUANTITY)},
        many=True,
    ),
}
_STATUS: Final[Shape] = {
    1: Part("phase"),
    7: Part("startTime", Kind.TIME),
    8: Part("containerStatuses", _CONTAINER_STATUS, many=True),
    9: Part("qosClass"),
    10: Part("initContainerStatuses", _CONTAINER_STATUS, many=True),
    15: Part("resourceClaimStatuses", {1: Part("name"), 2: Part("resourceClaimName")}, many=True),
    18: Part("extendedResourceClaimStatus", _EXTENDED),
    19: Part("allocatedResources", Kind.QUANTITY, keyed=True),
    20: Part("resources", _RESOURCES),
    21: Part("nodeAllocatableResourceClaimStatuses", _NODE_ALLOCATABLE, many=True),
}
POD: Final[Shape] = {1: Part("metadata", _METADATA), 2: Part("spec", _SPEC), 3: Part("status", _STATUS)}


def read_pod(data: bytes) -> Mapping[str, object]:
    """The pod in those bytes, as an object.

    Raises:
        ValueError: They are no v1.Pod, with the place.
    """
    return {"apiVersion": "v1", "kind": "Pod", **read_shape(data, POD, "pod")}

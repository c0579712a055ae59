"""Objects for the API server: the example driver's, and pods with claims; and conditions to wait for."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from machine import HugepagePool

from node_real.node import NODE, RealNode
from node_real.programs import IMAGE

DRIVER: Final = "hostdev.drahealth.example.com"
DEPLOY: Final = Path(__file__).parents[2] / "examples" / "hostdev_driver" / "deploy.yaml"
RESOURCE: Final = "/apis/resource.k8s.io/v1"
PODS: Final = "/api/v1/namespaces/default/pods"
CLAIMS: Final = f"{RESOURCE}/namespaces/default/resourceclaims"
SLICE: Final = f"{RESOURCE}/resourceslices/{NODE}-{DRIVER}-0"
PAGES: Final = "hostdev-hugepages"
CPUS: Final = "hostdev-cpus"
"""DeviceClasses of deploy.yaml."""


def deploy_objects() -> list[dict[str, Any]]:
    """Return the objects of the example driver's deploy.yaml."""
    return list(yaml.safe_load_all(DEPLOY.read_text()))


def create_claim(
    node: RealNode, name: str, device_class: str = PAGES, parameters: Mapping[str, object] | None = None
) -> None:
    """Create a claim for one device, with parameters for the driver."""
    devices: dict[str, Any] = {"requests": [{"name": "it", "exactly": {"deviceClassName": device_class}}]}
    if parameters:
        opaque = {"driver": DRIVER, "parameters": {"apiVersion": f"{DRIVER}/v1", **parameters}}
        devices["config"] = [{"opaque": opaque}]
    node.api.call("POST", CLAIMS, {"metadata": {"name": name}, "spec": {"devices": devices}})


def create_pod(
    node: RealNode,
    name: str,
    *claims: str,
    resources: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
) -> str:
    """Create a pod of one container that uses these claims. Returns its path."""
    container: dict[str, Any] = {
        "name": "main",
        "image": IMAGE,
        "args": list(arguments),
        "resources": {**(resources or {}), "claims": [{"name": claim} for claim in claims]},
    }
    spec = {
        "containers": [container],
        "resourceClaims": [{"name": claim, "resourceClaimName": claim} for claim in claims],
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 2,
    }
    node.api.call("POST", PODS, {"metadata": {"name": name}, "spec": spec})
    return f"{PODS}/{name}"


class ResourceStatus(NamedTuple):
    """Health of one device in a pod's status."""

    health: str
    message: str


def resource_status(pod: Mapping[str, Any]) -> list[ResourceStatus]:
    """Return the health of a pod's devices, in the order of its status."""
    containers = pod.get("status", {}).get("containerStatuses", [])
    return [
        ResourceStatus(one.get("health", ""), one.get("message", ""))
        for container in containers
        for claim in container.get("allocatedResourcesStatus", [])
        for one in claim.get("resources", [])
    ]


def has_health(health: str, text: str = "") -> Callable[[Mapping[str, Any]], bool]:
    """Return the condition that a device of a pod has a health, with a text in its message."""
    return lambda pod: any(one.health == health and text in one.message for one in resource_status(pod))


def phase_is(phase: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return the condition that a pod is in a phase."""
    return lambda pod: pod.get("status", {}).get("phase") == phase


def taint_keys(resource_slice: Mapping[str, Any], effect: str) -> set[str]:
    """Return the keys of a slice's taints that have an effect."""
    devices = resource_slice["spec"].get("devices") or []
    return {one["key"] for device in devices for one in device.get("taints", []) if one["effect"] == effect}


def events_of(node: RealNode, pod: str, reason: str) -> list[str]:
    """Return the messages of a pod's events of a reason."""
    chosen = f"fieldSelector=involvedObject.name%3D{pod},reason%3D{reason}"
    items = node.api.call("GET", f"/api/v1/namespaces/default/events?{chosen}")["items"]
    return [one["message"] for one in items]


def shrink(pool: HugepagePool, pages: int) -> None:
    """Set the size of the machine's pool, as an operator or a service on the node does by mistake."""
    pool.resize(pages)

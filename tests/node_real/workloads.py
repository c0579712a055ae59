"""Objects for the API server: the example driver's, and pods with claims; and conditions to wait for."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from node_real.node import NODE, RealNode
from node_real.programs import HOST_IMAGE, IMAGE, ROOT

DRIVER: Final = "hostdev.drahealth.example.com"
DEPLOY: Final = Path(__file__).parents[2] / "examples" / "hostdev_driver" / "deploy.yaml"
RESOURCE: Final = "/apis/resource.k8s.io/v1"
PODS: Final = "/api/v1/namespaces/default/pods"
CLAIMS: Final = f"{RESOURCE}/namespaces/default/resourceclaims"
SLICE: Final = f"{RESOURCE}/resourceslices/{NODE}-{DRIVER}-0"
PAGES: Final = "hostdev-hugepages"
CPUS: Final = "hostdev-cpus"
"""DeviceClasses of deploy.yaml."""
GO_CLASS: Final = "godev"


def deploy_objects() -> list[dict[str, Any]]:
    """Return the objects of the example driver's deploy.yaml."""
    return list(yaml.safe_load_all(DEPLOY.read_text()))


def device_class(name: str, driver: str) -> dict[str, Any]:
    """Return the DeviceClass of all devices of a driver."""
    selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
    return {"metadata": {"name": name}, "spec": {"selectors": [selector]}}


def daemon_set(node: RealNode, *arguments: str) -> dict[str, Any]:
    """Return deploy.yaml's DaemonSet with an image of this machine: its Python, and the source tree.

    All else is as deployed: the service account, the security context, the paths and the rolling update.
    """
    found = next(obj for obj in deploy_objects() if obj["kind"] == "DaemonSet")
    spec = found["spec"]["template"]["spec"]
    container = spec["containers"][0]
    container["image"] = HOST_IMAGE
    container["command"] = [sys.executable, "-m", "hostdev_driver", *arguments]
    paths = [ROOT, ROOT / "examples"]
    container["env"].append({"name": "PYTHONPATH", "value": os.pathsep.join(map(str, paths))})
    container["env"].append({"name": "PYTHONDONTWRITEBYTECODE", "value": "1"})
    places = {
        Path("/usr"),
        Path("/etc/ld.so.cache"),
        ROOT,
        Path(sys.prefix).resolve(),
        Path(sys.base_prefix).resolve(),
    }
    for number, place in enumerate(sorted(places)):
        if any(place != other and place.is_relative_to(other) for other in places):
            continue
        spec["volumes"].append({"name": f"host-{number}", "hostPath": {"path": str(place)}})
        mount = {"name": f"host-{number}", "mountPath": str(place), "readOnly": True}
        container["volumeMounts"].append(mount)
    return found


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
        ResourceStatus(item.get("health", ""), item.get("message", ""))
        for container in containers
        for claim in container.get("allocatedResourcesStatus", [])
        for item in claim.get("resources", [])
    ]


def has_health(health: str, text: str = "") -> Callable[[Mapping[str, Any]], bool]:
    """Return the condition that a device of a pod has a health, with a text in its message."""
    return lambda pod: any(entry.health == health and text in entry.message for entry in resource_status(pod))


def phase_is(phase: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return the condition that a pod is in a phase."""
    return lambda pod: pod.get("status", {}).get("phase") == phase


def taint_keys(resource_slice: Mapping[str, Any], effect: str) -> set[str]:
    """Return the keys of a slice's taints that have an effect."""
    devices = resource_slice["spec"].get("devices") or []
    return {
        taint["key"] for device in devices for taint in device.get("taints", []) if taint["effect"] == effect
    }


def events_of(node: RealNode, pod: str, reason: str) -> list[str]:
    """Return the messages of a pod's events of a reason."""
    chosen = f"fieldSelector=involvedObject.name%3D{pod},reason%3D{reason}"
    items = node.api.call("GET", f"/api/v1/namespaces/default/events?{chosen}")["items"]
    return [item["message"] for item in items]

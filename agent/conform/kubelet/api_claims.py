"""ResourceSlices and claims of a conformance test at the API server, and the choice of devices for the
claims. All calls of the API server block up to 10 s for the connect and for each read."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from agent.conform.outcomes import shorten
from agent.errors import ApiError, ApiUnreachableError
from agent.model.json_values import JsonObject, get_mapping, get_mappings, get_text
from agent.serve.kube_api.api_server import NOT_FOUND, ApiServer

SLICES: Final = "resourceslices"
CLAIMS: Final = "resourceclaims"


def read_slices_and_claims(api: ApiServer, driver: str) -> tuple[list[JsonObject], list[JsonObject]]:
    """Return the ResourceSlices of a driver, and all ResourceClaims of all namespaces.

    If `driver` is empty, the ResourceSlices are those of all drivers.

    Raises:
        ApiError, ApiUnreachableError, OSError: See :meth:`ApiServer.call`.
    """
    return (
        list(api.list_objects(api.dra_path(SLICES), f"spec.driver={driver}" if driver else "").items),
        list(api.list_objects(api.dra_path(CLAIMS)).items),
    )


def create_claim(api: ApiServer, claim: JsonObject) -> JsonObject:
    """Create a claim and write its allocation, as the scheduler does; return the created claim.

    Raises:
        ApiError, ApiUnreachableError, OSError: See :meth:`ApiServer.call`. No claim remains then.
    """
    metadata = get_mapping(claim, "metadata")
    namespace, name = (get_text(metadata, key, "metadata") for key in ("namespace", "name"))
    version = f"resource.k8s.io/{api.dra_version()}"
    requests = get_mapping(get_mapping(claim, "spec"), "devices")["requests"]
    body: dict[str, Any] = {
        "apiVersion": version,
        "kind": "ResourceClaim",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"devices": {"requests": _in_version(requests, api.dra_version())}},
    }
    path = api.dra_path("namespaces", namespace, CLAIMS)
    created = api.call("POST", path, body)
    try:
        return api.call("PUT", f"{path}/{name}/status", created | {"status": claim["status"]})
    except BaseException:
        delete_claim(api, claim)
        raise


def _in_version(requests: object, version: str) -> object:
    """Return the requests of a ResourceClaim in the format of an API version: v1beta1 has no ``exactly``."""
    if version != "v1beta1" or not isinstance(requests, list):
        return requests
    found = []
    for request in requests:
        fields = dict(get_mapping({"request": request}, "request"))
        exactly = get_mapping(fields, "exactly", "request")
        fields.pop("exactly", None)
        found.append({**fields, **exactly})
    return found


def delete_claim(api: ApiServer, claim: JsonObject) -> str:
    """Delete a claim that :func:`create_claim` created; return why it may still exist, or an empty text."""
    metadata = get_mapping(claim, "metadata")
    namespace, name = (get_text(metadata, key, "metadata") for key in ("namespace", "name"))
    try:
        api.call("DELETE", api.dra_path("namespaces", namespace, CLAIMS, name))
    except (ApiError, ApiUnreachableError, OSError) as error:
        if isinstance(error, ApiError) and error.status == NOT_FOUND:
            return ""
        return f"claim {namespace}/{name} was not deleted: {shorten(str(error))}"
    return ""


# --- choice of devices -------------------------------------------------------------------------------------

CLAIMS_MADE: Final = 2
"""Number of claims that a session makes: two, so that a check sees errors that name another claim."""
KEEPING_OFF: Final = frozenset({"NoSchedule", "NoExecute"})
"""Effects of device taints that keep pods off a device."""
SHARING: Final = ("consumesCounters", "allowMultipleAllocations")
"""Fields of a device in a ResourceSlice that mean that another device or claim may use its hardware."""


def choose_devices(
    slices: Iterable[JsonObject], claims: Iterable[JsonObject], driver: str, node: str
) -> tuple[tuple[str, str], ...]:
    """Return (pool, name) of up to CLAIMS_MADE free devices of a driver on a node.

    Args:
        slices: ResourceSlices of any drivers, in any version.
        claims: ResourceClaims, whose allocated devices are not free.
        driver: Name of the driver.
        node: Name of the Kubernetes node, if the slices belong to several nodes.

    Raises:
        ValueError: No device is free, with the reasons; or an object is malformed.
    """
    specs = [get_mapping(obj, "spec") for obj in slices]
    own = _of_node([spec for spec in specs if spec.get("driver") == driver], driver, node)
    held = set(_held_devices(claims, driver))
    chosen: list[tuple[str, str]] = []
    reasons: Counter[str] = Counter()
    for pool, devices in _complete_pools(own, reasons):
        for device in devices:
            name = get_text(device, "name", "device")
            if reason := _reason_not_to_use(device, (pool, name) in held):
                reasons[reason] += 1
            else:
                chosen.append((pool, name))
    if not chosen:
        text = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        raise ValueError(f"no device of driver {driver} is free: {text or 'its slices have none'}")
    return tuple(sorted(chosen)[:CLAIMS_MADE])


def _of_node(specs: Sequence[JsonObject], driver: str, node: str) -> Sequence[JsonObject]:
    """Return the specs of the ResourceSlices of one node.

    Raises ValueError if the slices belong to several nodes, but none to `node`.
    """
    nodes = {get_text(spec, "nodeName", "spec") for spec in specs}
    if not specs:
        raise ValueError(f"no ResourceSlice belongs to driver {driver}; does the driver run on a node?")
    if len(nodes) == 1:
        return specs
    if node not in nodes:
        names = ", ".join(sorted(nodes - {""}))
        raise ValueError(
            f"ResourceSlices of driver {driver} belong to nodes {names}, not to {node}; "
            "choose one with --node-name"
        )
    return [spec for spec in specs if spec.get("nodeName") == node]


def _held_devices(claims: Iterable[JsonObject], driver: str) -> Iterator[tuple[str, str]]:
    """Yield (pool, name) of each device of a driver that is allocated to a claim."""
    for claim in claims:
        allocation = get_mapping(get_mapping(claim, "status"), "allocation", "status")
        devices = get_mapping(allocation, "devices", "status.allocation")
        for result in get_mappings(devices, "results", "status.allocation.devices"):
            if result.get("driver") == driver:
                yield get_text(result, "pool", "result"), get_text(result, "device", "result")


def _complete_pools(
    specs: Iterable[JsonObject], reasons: Counter[str]
) -> Iterator[tuple[str, list[JsonObject]]]:
    """Yield each complete pool with its devices, from the ResourceSlices of the pool's newest generation.

    Slices of incomplete pools are counted in `reasons`.
    """
    pools: dict[str, dict[int, list[JsonObject]]] = {}
    for spec in specs:
        pool = get_mapping(spec, "pool", "spec")
        generation = pool.get("generation")
        number = generation if isinstance(generation, int) else 0
        pools.setdefault(get_text(pool, "name", "pool"), {}).setdefault(number, []).append(spec)
    for name, generations in pools.items():
        newest = generations[max(generations)]
        expected = get_mapping(newest[0], "pool").get("resourceSliceCount")
        if len(newest) != expected:
            reasons["in slices of a pool that is not complete"] += sum(
                len(get_mappings(spec, "devices", "spec")) for spec in newest
            )
            continue
        yield name, [device for spec in newest for device in get_mappings(spec, "devices", "spec")]


def _reason_not_to_use(device: JsonObject, is_held: bool) -> str:
    """Return why a device is not used for a claim; empty: it is free."""
    basic = device.get("basic")  # in v1beta1
    fields = basic if isinstance(basic, Mapping) else device
    effects = {get_text(taint, "effect", "taint") for taint in get_mappings(fields, "taints", "device")}
    if is_held:
        return "in claims"
    if effects & KEEPING_OFF:
        return "with a taint"
    if any(fields.get(key) for key in SHARING):
        return "shared with other devices or claims"
    return ""

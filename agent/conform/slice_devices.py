"""Choice of devices for the claims of a conformance test, from ResourceSlices and from held devices. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from agent.model.json_values import JsonObject, get_mapping, get_mappings, get_text

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
    """Yield (pool, name) of each device of a driver that a claim holds."""
    for claim in claims:
        allocation = get_mapping(get_mapping(claim, "status"), "allocation", "status")
        devices = get_mapping(allocation, "devices", "status.allocation")
        for result in get_mappings(devices, "results", "status.allocation.devices"):
            if result.get("driver") == driver:
                yield get_text(result, "pool", "result"), get_text(result, "device", "result")


def _complete_pools(
    specs: Iterable[JsonObject], reasons: Counter[str]
) -> Iterator[tuple[str, list[JsonObject]]]:
    """Yield each pool with its devices in the newest generation; count the slices of incomplete pools."""
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
    effects = {taint.get("effect") for taint in get_mappings(fields, "taints", "device")}
    if is_held:
        return "in claims"
    if effects & KEEPING_OFF:
        return "with a taint"
    if any(fields.get(key) for key in SHARING):
        return "shared with other devices or claims"
    return ""

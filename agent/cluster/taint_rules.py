"""DeviceTaintRules for Unhealthy devices of drivers that publish no taints themselves.

A DeviceTaintRule whose selector lacks a field matches more than one device. An empty selector matches every
device of the cluster on API servers before 1.38. check_rule() refuses such a rule right before it is sent.
Only rules with this agent's labels and field manager are changed or deleted.
"""

import hashlib
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from agent.cluster.node_objects import CONFLICT
from agent.devices.taints import TaintPolicy, TaintState, decide_taints, restore_taints
from agent.errors import ApiError
from agent.model.claim import DeviceRef
from agent.model.health import Effect, Taint, Taints
from agent.model.json_values import JsonObject
from agent.model.report import Report
from agent.model.time import NS, Instant, rfc3339
from agent.serve.kube_api.api_server import (
    DRA_GROUP,
    NOT_FOUND,
    NOT_SERVED,
    SERVER_WIDE,
    ApiServer,
    metadata_of,
    path_of,
)
from agent.system.output import get_logger

RULES: Final = "devicetaintrules"
VERSIONS: Final = ("v1", "v1beta2", "v1alpha3")
"""Versions of DeviceTaintRule, best first: v1 since 1.37, v1beta2 in 1.36, v1alpha3 since 1.33."""
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
NODE_LABEL: Final = "drahealth.dev/node"
"""Label of a DeviceTaintRule with the node's name, or with its hash if the name is no valid label value."""
WRITES_MAX: Final = 32
"""Largest number of DeviceTaintRules that one call of :meth:`TaintRules.sync` writes or deletes."""
REFUSALS_MAX: Final = 4
"""Number of refused rules after which a pass ends; the next pass begins with other rules."""
_LABEL: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_WRITTEN_EFFECTS: Final = frozenset({Effect.NO_SCHEDULE, Effect.NO_EXECUTE})

_RuleObject = Mapping[str, Any]

log = get_logger(__name__)


def check_rule(rule: _RuleObject) -> None:
    """Check that a DeviceTaintRule selects exactly one device.

    Raises:
        ValueError: The selector lacks the driver, the pool or the device.
    """
    selector = rule.get("spec", {}).get("deviceSelector") or {}
    for key in ("driver", "pool", "device"):
        if not isinstance(selector.get(key), str) or not selector[key]:
            raise ValueError(
                f"DeviceTaintRule {rule['metadata']['name']}: not sent: its selector has no {key}, so "
                "the rule could match other devices"
            )


def node_label(node: str) -> str:
    """Return the value of :data:`NODE_LABEL`, by which the DeviceTaintRules of a node are found."""
    return node if _LABEL.fullmatch(node) else hashlib.sha256(node.encode()).hexdigest()[:32]


def rule_name(device: DeviceRef) -> str:
    """Return the name of a device's DeviceTaintRule, which is unique in the cluster."""
    digest = hashlib.sha256("\0".join(device).encode()).hexdigest()[:16]
    head = re.sub(r"[^a-z0-9.-]", "-", f"{device.pool}-{device.device}".lower())[:200].strip("-.")
    return f"drahealth-{head}-{digest}"


class TaintRules:
    """DeviceTaintRules of one node: decided from reports, and written to the API server. For one thread."""

    def __init__(
        self, api: ApiServer, node: str, manager: str, ensure_lease: Callable[[], bool] = lambda: True
    ) -> None:
        """Create the rules' object; the API server is not called yet.

        Args:
            api: Client of the API server.
            node: Name of the node.
            manager: Field manager of the agent.
            ensure_lease: Returns whether this agent still may write, right before each write.
        """
        self.count = 0
        """Number of the node's DeviceTaintRules in the API server, as this agent knows it."""
        self._api = api
        self._label = node_label(node)
        self._manager = manager
        self._ensure_lease = ensure_lease
        self._version = ""
        self._conflicts: set[str] = set()
        """Names of the rules that others made or changed, until the next list."""
        self._existing: dict[str, _RuleObject] | None = None
        """DeviceTaintRules of this agent in the API server, by name; None: not listed yet."""
        self._states: dict[str, TaintState] = {}
        self._refused: set[str] = set()
        """Names of rules whose last write or deletion was refused; they come last."""
        self._logged: set[str] = set()

    def invalidate_rules(self) -> None:
        """Let the next :meth:`sync` list the DeviceTaintRules again, since other clients may change them."""
        self._existing = None
        self._conflicts.clear()

    def invalidate_taints(self) -> None:
        """Let the next :meth:`sync` take the former taints of all devices from the DeviceTaintRules it finds.

        For a pause in which devices may have recovered.
        """
        self._states.clear()

    def sync(
        self,
        report: Report,
        drivers: Sequence[str],
        served: Container[str],
        policy: TaintPolicy,
        now: Instant,
        *,
        owner: JsonObject,
        undeclared: Container[str] = (),
    ) -> float | None:
        """Write and delete DeviceTaintRules, so that the API server has those that a report requires.

        Args:
            report: Newest report.
            drivers: Drivers that publish no taints. Rules of other drivers that this agent made are deleted.
                A driver that has declared no devices yet, and is not served or in `undeclared`, keeps its
                rules as they are.
            served: Drivers whose devices' health the agent serves to the kubelet.
            policy: The operator's policy for taints.
            now: Current time.
            owner: Owner reference to the Node, with which Kubernetes deletes the rules.
            undeclared: Drivers whose own devices are not declared yet: the names of the host's are others.

        Returns:
            Time until the next call is due without a new report [s]; None: no call is due.

        Raises:
            ApiError, ApiUnreachableError, OSError: See :meth:`ApiServer.call`; the next call continues.
        """
        if self._existing is None:
            self._existing = self._list()
        self._states = {driver: self._states[driver] for driver in drivers if driver in self._states}
        self._adopt(self._existing.values(), drivers, policy)
        known = [
            driver
            for driver in drivers
            if driver in report.declaring or (driver in served and driver not in undeclared)
        ]
        wanted = self._decide_rules(report, known, policy, now)
        for rule in wanted.values():
            rule["metadata"]["ownerReferences"] = [owner]
        due = [
            name
            for name, rule in wanted.items()
            if name not in self._conflicts and not _is_same(self._existing.get(name), rule)
        ]
        kept = set(drivers) - set(known)
        obsolete = [
            name
            for name, rule in self._existing.items()
            if name not in wanted and (rule["spec"].get("deviceSelector") or {}).get("driver") not in kept
        ]
        try:
            is_complete = self._apply([*due, *obsolete], wanted)
        finally:
            if self._existing is not None:
                self.count = len(self._existing)
        if not is_complete:
            return 0.0
        times = [due_ns for driver in known if (due_ns := self._states[driver].due_ns) is not None]
        return max(0.0, (min(times) - now.mono_ns) / NS) if times else None

    def _apply(self, names: Sequence[str], wanted: Mapping[str, dict[str, Any]]) -> bool:
        """Write those DeviceTaintRules in `names` that are wanted, and delete the others in `names`.

        A rule that the API server refuses does not stop the other rules.

        Returns True if all names were handled, False if the next call must continue.
        Raises ApiError or ValueError: the first refusal.
        """
        self._refused &= set(names)
        refusals: list[Exception] = []
        for name in sorted(names, key=self._refused.__contains__)[:WRITES_MAX]:
            if not self._ensure_lease():
                return False
            try:
                if name in wanted:
                    self._write(name, wanted[name])
                else:
                    self._delete(name)
            except (ApiError, ValueError) as error:
                if isinstance(error, ApiError) and error.status in SERVER_WIDE | {NOT_FOUND}:
                    raise
                self._refused.add(name)
                refusals.append(error)
                if len(refusals) == REFUSALS_MAX:  # also the answer to a missing right
                    break
            else:
                self._refused.discard(name)
        if refusals:
            raise refusals[0]
        return len(names) <= WRITES_MAX

    # --- decision -------------------------------------------------------------------------------------------

    def _decide_rules(
        self, report: Report, drivers: Sequence[str], policy: TaintPolicy, now: Instant
    ) -> dict[str, dict[str, Any]]:
        """Return the DeviceTaintRules that a report requires, by name: one per device for its worst taint."""
        found = {}
        for driver in drivers:
            before = self._states.get(driver, TaintState())
            self._states[driver] = decide_taints(before, report, driver, policy, now)
            for device, taints in self._states[driver].taints.devices.items():
                if taints and taints[0].effect in _WRITTEN_EFFECTS:
                    found[rule_name(device)] = self._rule(device, taints[0])
        return found

    def _rule(self, device: DeviceRef, taint: Taint) -> dict[str, Any]:
        spec = {
            "deviceSelector": {"driver": device.driver, "pool": device.pool, "device": device.device},
            "taint": {
                "key": taint.key,
                **({"value": taint.value} if taint.value else {}),
                "effect": str(taint.effect),
                "timeAdded": rfc3339(taint.added_wall_s),
            },
        }
        metadata = {
            "name": rule_name(device),
            "labels": {MANAGED_BY: self._manager, NODE_LABEL: self._label},
        }
        return {"kind": "DeviceTaintRule", "metadata": metadata, "spec": spec}

    def _adopt(self, rules: Iterable[_RuleObject], drivers: Sequence[str], policy: TaintPolicy) -> None:
        """Restore the taints that a former run of the agent wrote as DeviceTaintRules.
        So ``timeAdded`` stays, and the rule of a device that became Healthy stays for ``policy.quiet_s``."""
        if self._states.keys() >= set(drivers):
            return
        kept: dict[DeviceRef, tuple[Taint, ...]] = {}
        for rule in rules:
            try:
                device, taint = _parse_rule(rule)
            except (KeyError, TypeError, ValueError):  # such a rule is written again or deleted
                continue
            kept[device] = (taint,)
        for driver in drivers:
            if driver not in self._states:
                self._states[driver] = restore_taints(Taints(kept), driver, policy)

    # --- API server -----------------------------------------------------------------------------------------

    def _list(self) -> dict[str, _RuleObject]:
        """Return the DeviceTaintRules that an agent of this node wrote, by name.
        Raises ApiError if the API server serves none of :data:`VERSIONS`."""
        selector = f"{MANAGED_BY}={self._manager},{NODE_LABEL}={self._label}"
        for version in sorted(VERSIONS, key=self._version.__ne__):  # the last one first
            try:
                items = self._api.list_objects(self._path(version), label_selector=selector).items
            except ApiError as error:
                if error.status != NOT_FOUND:
                    raise
                continue
            self._version = version
            return {item["metadata"]["name"]: item for item in items if self._is_own(item)}
        self._version = ""
        raise ApiError(
            NOT_SERVED,
            "NotServed",
            f"the API server serves DeviceTaintRules in none of {', '.join(VERSIONS)}; turn on its "
            "feature gate DRADeviceTaintRules, or remove k8s.taint-rules",
        )

    def _is_own(self, rule: _RuleObject) -> bool:
        """Return whether this agent wrote a DeviceTaintRule: its field manager is in ``managedFields``."""
        fields = rule["metadata"].get("managedFields") or ()
        if any(entry.get("manager") == self._manager for entry in fields):
            return True
        self._log_once(rule["metadata"]["name"], "has the labels of this agent, and was made by others")
        return False

    def _write(self, name: str, rule: dict[str, Any]) -> None:
        assert self._existing is not None
        check_rule(rule)
        body = {"apiVersion": f"{DRA_GROUP}/{self._version}"} | rule
        try:
            written = self._api.apply(self._path(self._version, name), body, manager=self._manager)
        except ApiError as error:
            if error.status == NOT_FOUND:  # the version is served no longer, after an update of the cluster
                self._version, self._existing = "", None
            if error.status != CONFLICT:
                raise
            self._log_once(name, f"was changed by others: {error}")
            self._conflicts.add(name)
        else:
            self._existing[name] = rule | {
                "metadata": rule["metadata"] | {"uid": metadata_of(written)["uid"]}
            }

    def _delete(self, name: str) -> None:
        assert self._existing is not None
        try:
            conditions = {
                "uid": self._existing[name]["metadata"]["uid"]
            }  # not one that others made meanwhile
            options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": conditions}
            self._api.call("DELETE", self._path(self._version, name), options)
        except ApiError as error:
            if error.status == NOT_FOUND and error.reason != "NotFound":  # not the rule, but the version
                self._version, self._existing = "", None
                raise
            if error.status not in {NOT_FOUND, CONFLICT}:
                raise
        del self._existing[name]

    def _log_once(self, name: str, problem: str) -> None:
        if name not in self._logged:
            self._logged.add(name)
            log.warning("cluster: DeviceTaintRule %s: %s; left as it is", name, problem)

    @staticmethod
    def _path(version: str, *name: str) -> str:
        return path_of("apis", DRA_GROUP, version, RULES, *name)


def _is_same(found: _RuleObject | None, wanted: _RuleObject) -> bool:
    """Return whether the API server has a rule as it is wanted, with the same owner."""
    if found is None or found.get("spec") != wanted["spec"]:
        return False
    owners, (owner,) = found["metadata"].get("ownerReferences") or (), wanted["metadata"]["ownerReferences"]
    return any(ref.get("uid") == owner["uid"] for ref in owners)


def _parse_rule(rule: _RuleObject) -> tuple[DeviceRef, Taint]:
    """Return device and taint of a DeviceTaintRule.

    Raises KeyError, TypeError or ValueError if the rule has another form than this agent's rules.
    """
    selector: Mapping[str, str] = rule["spec"]["deviceSelector"]
    taint: Mapping[str, str] = rule["spec"]["taint"]
    added = int(datetime.fromisoformat(taint["timeAdded"]).timestamp())
    device = DeviceRef(selector["driver"], selector["pool"], selector["device"])
    return device, Taint(taint["key"], taint.get("value", ""), Effect(taint["effect"]), added)

"""Preparing and unpreparing the claims of a pod, with the kubelet's error texts.

It follows kubelet ``cm/dra/manager.go``, without claims of pod groups, claims from templates and extended
resources. ``pods.py`` decides when to call it and retries.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kubelet.calls import CallFailed, dra_message
from kubelet.claims import ClaimInfo, ClaimInfos, PreparedDevice, new_claim_info
from kubelet.history import Called, History
from kubelet.plugins import Plugin, Plugins
from kubelet.versions import Version

ClaimObjects = Mapping[tuple[str, str], Mapping[str, Any]]
"""The API server's claims by namespace and name."""


class Preparer:
    """Component of one kubelet process that prepares and unprepares claims."""

    def __init__(
        self,
        plugins: Plugins,
        infos: ClaimInfos,
        objects: ClaimObjects,
        history: History,
        version: Version,
        rng: random.Random,
    ) -> None:
        """Args:
        plugins: The registered plugins.
        infos: The stored state of claims.
        objects: The API server's claims.
        history: Receives an entry for each call.
        version: The release of the kubelet.
        rng: Shuffles where Go iterates over a map.
        """
        self._plugins = plugins
        self._infos = infos
        self._objects = objects
        self._history = history
        self._version = version
        self._rng = rng

    def prepare(self, pod: str, namespace: str, claims: Sequence[str]) -> None:
        """Prepare the claims of a pod that are not prepared yet.

        Args:
            pod: The pod's uid.
            namespace: The pod's namespace.
            claims: The claims' names.

        Raises:
            ValueError: the first error; the steps after it were not run.
        """
        found = [self._look_up(pod, namespace, name) for name in claims]
        batches: dict[Plugin, list[ClaimInfo]] = {}
        new: list[ClaimInfo] = []
        with self._infos.lock_infos() as infos:
            for new_info, plugins in found:
                info = infos.setdefault((new_info.namespace, new_info.name), new_info)
                if info.uid != new_info.uid:
                    raise ValueError(
                        f"old ResourceClaim with same name {new_info.name} and different UID {info.uid} still"
                        " exists (previous pod force-deleted?!)"
                    )
                if info.unpreparing and self._version.checks_pod:
                    raise ValueError(f"ResourceClaim {info.name} is being unprepared")
                info.pods.add(pod)
                self._infos.save()
                if info.prepared:
                    continue
                new.append(info)
                for driver in info.drivers:
                    batches.setdefault(plugins[driver], []).append(info)
        for plugin, batch in self._shuffle(batches.items()):
            response = self._call("NodePrepareResources", plugin, batch)
            for info, result in self._results("NodePrepareResources", batch, response):
                with self._infos.lock_infos():
                    devices = info.drivers.setdefault(plugin.driver, [])
                    if self._version.replaces_devices:
                        devices.clear()
                    devices.extend(map(_device, result.devices))
        with self._infos.lock_infos():
            for info in new:
                info.prepared = True
            self._infos.save()

    def unprepare(self, pod: str, namespace: str, claims: Sequence[str]) -> None:
        """Remove a pod from its claims and unprepare the claims that no other pod uses.

        Args:
            pod: The pod's uid.
            namespace: The pod's namespace.
            claims: The claims' names.

        Raises:
            ValueError: the first error; the steps after it were not run.
        """
        batches: dict[str, list[ClaimInfo]] = {}
        last: list[ClaimInfo] = []
        with self._infos.lock_infos() as infos:
            for name in claims:
                info = infos.get((namespace, name))
                if info is None or (self._version.checks_pod and pod not in info.pods):
                    continue
                if len(info.pods) > 1:
                    info.pods.discard(pod)
                    continue
                last.append(info)
                info.unpreparing = True
                for driver in info.drivers:
                    batches.setdefault(driver, []).append(info)
        for driver, batch in self._shuffle(batches.items()):
            response = self._call("NodeUnprepareResources", self._plugins.get(driver), batch)
            for _ in self._results("NodeUnprepareResources", batch, response):
                pass  # the iterator raises an error of the driver
        with self._infos.lock_infos() as infos:
            for info in last:
                infos.pop((info.namespace, info.name), None)
            self._infos.save()

    def _look_up(self, pod: str, namespace: str, name: str) -> tuple[ClaimInfo, dict[str, Plugin]]:
        """Check a claim before anything is stored or called."""
        claim = self._objects.get((namespace, name))
        if claim is None:
            raise ValueError(f'fetch ResourceClaim {name}: resourceclaims.resource.k8s.io "{name}" not found')
        users = {user["uid"] for user in claim["status"].get("reservedFor", [])}
        if pod not in users:
            uid = claim["metadata"]["uid"]
            raise ValueError(f"pod pod-{pod} ({pod}) is not allowed to use ResourceClaim {name} ({uid})")
        try:
            info = new_claim_info(claim)
        except ValueError as error:
            raise ValueError(f"ResourceClaim {name}: {error}") from None
        return info, {driver: self._plugins.get(driver) for driver in info.drivers}

    def _call(self, method: str, plugin: Plugin, batch: Sequence[ClaimInfo]) -> Any:
        request = dra_message(plugin.service, f"{method}Request")()
        for info in batch:
            request.claims.add(namespace=info.namespace, uid=info.uid, name=info.name)
        start_s, response, failure = time.monotonic(), None, ""
        try:
            response = plugin.call(method, request)
        except CallFailed as error:
            failure = str(error)
            raise ValueError(f"{method}: {error}") from error
        finally:
            uids, took_s = tuple(info.uid for info in batch), time.monotonic() - start_s
            target = (plugin.driver, plugin.endpoint, plugin.service)
            self._history.add(Called(method, *target, uids, failure, response, took_s))
        return response

    def _results(
        self, method: str, batch: Sequence[ClaimInfo], response: Any
    ) -> Iterator[tuple[ClaimInfo, Any]]:
        """Yield each claim with its result. The claims before a failing one are stored."""
        requested = {info.uid: info for info in batch}
        for uid, result in self._shuffle(response.claims.items()):
            if uid not in requested:
                raise ValueError(f"{method} returned result for unknown claim UID {uid}")
            if result.error:
                raise ValueError(f"{method} failed for ResourceClaim {requested[uid].name}: {result.error}")
            yield requested[uid], result
        if skipped := len(batch) - len(response.claims):
            raise ValueError(f"{method} skipped {skipped} ResourceClaims")

    def _shuffle(self, items: Any) -> list[Any]:
        shuffled = list(items)
        self._rng.shuffle(shuffled)
        return shuffled


def _device(device: Any) -> PreparedDevice:
    share = getattr(device, "share_id", "")  # v1beta1 lacks the field
    return PreparedDevice(
        device.pool_name, device.device_name, tuple(device.request_names), tuple(device.cdi_device_ids), share
    )

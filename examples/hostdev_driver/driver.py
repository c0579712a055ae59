"""The driver: prepare and unprepare of claims, and a check of its own."""

from pathlib import Path

import drahealth
from hostdev_driver.containers import devices_for
from hostdev_driver.grant_store import GrantStore
from hostdev_driver.grants import taken_pages
from hostdev_driver.host import Host
from hostdev_driver.parameters import requested_grant


class HostDriver:
    """Driver of the host's devices. Each call runs in a thread of its own and may block."""

    def __init__(self, monitor: drahealth.Monitor, host: Host, store: GrantStore, cdi_dir: Path) -> None:
        self.monitor, self.host, self.store, self.cdi_dir = monitor, host, store, cdi_dir
        self.kind = f"{monitor.driver}/device"
        monitor.add(*host.devices)
        monitor.check(every_s=5, timeout_s=2, devices="hugepages-*", name="pages-left")(self.pages_left)

    def prepare(self, claim: drahealth.Claim) -> list[drahealth.PreparedDevice]:
        """Prepare a claim. Idempotent, also after a lost answer, a restart or a reboot."""
        for device in claim.devices:
            self.monitor.require_healthy(device)
        grants = tuple(requested_grant(claim, device, self.host) for device in claim.devices)
        grants = self.store.hold(claim, grants, self.host)
        ids = drahealth.write_cdi_spec(self.cdi_dir, self.kind, claim.uid, devices_for(grants))
        return [
            drahealth.PreparedDevice(
                requests=(grant.request,),
                pool=grant.pool,
                device=grant.device,
                cdi_ids=(id_,),
                share_id=grant.share_id,
            )
            for grant, id_ in zip(grants, ids, strict=True)
        ]

    def unprepare(self, ref: drahealth.ClaimRef) -> None:
        """Unprepare a claim; does nothing for a claim that was never prepared.

        The claim's containers have ended, so its devices are free even if the CDI file cannot be removed.
        """
        try:
            drahealth.remove_cdi_spec(self.cdi_dir, self.kind, ref.uid)
        finally:
            self.store.release(ref.uid)

    def pages_left(self, device: drahealth.Device) -> drahealth.Finding | None:
        """Report pages in use without a claim: the device works, but the next claim may find too few
        pages."""
        assert isinstance(device.part, drahealth.Hugepages)
        size, numa = device.part.size, device.part.numa
        if not taken_pages(self.store.read(), self.host, size, numa):
            return None
        return drahealth.degraded("hostdev.pages_taken", f"pages of {size} that no claim holds are in use")

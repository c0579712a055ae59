"""Entry point of ``python -m hostdev_driver``."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import drahealth
from hostdev_driver.arguments import parser
from hostdev_driver.claims import ClaimFiles
from hostdev_driver.driver import HostDriver
from hostdev_driver.grant_store import GrantStore
from hostdev_driver.grants import Holdings
from hostdev_driver.host import Hardware, Host, find_hardware
from hostdev_driver.saved_hardware import offered_hardware, read_boot_id
from hostdev_driver.slices import slice_device

EXIT_FAILED = 70
EXIT_CONFIG = 78

log = logging.getLogger("hostdev_driver")


def main(args: Sequence[str] | None = None) -> int:
    """Run the driver until SIGTERM or SIGINT.

    Returns:
        Exit code: 0; 70 if the driver failed, 78 if the arguments cannot be used.
    """
    options = parser().parse_args(args)
    logging.basicConfig(level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        os.kill(os.getpid(), signal.SIGTERM)  # ends run(); the restarted driver gets a new monitor

    try:
        _run(options, failed)
    except drahealth.ConfigError as error:
        log.error("%s", error)  # noqa: TRY400  # an operator's error needs no traceback
        return EXIT_CONFIG
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        failures.append(error.__cause__)  # of the plugin server
    for failure in failures:
        log.error("driver failed: %s: %s", type(failure).__name__, failure)
    return EXIT_FAILED if failures else 0


def _run(options: argparse.Namespace, failed: Callable[[BaseException], None]) -> None:
    driver, kubelet_dir = options.driver_name, options.kubelet_dir
    plugin_dir = options.plugin_dir or kubelet_dir / "plugins" / driver
    state_dir = options.state_dir or plugin_dir
    store = GrantStore(state_dir / "ledger.json")
    host = Host(
        options.node_name,
        options.sysfs_root,
        options.procfs_root,
        shares=options.hugepage_shares,
        cpus_each=options.cpus_each,
        reserved=options.reserved_cpus,
        hardware=_hardware(options, store, state_dir / "hardware.json"),
    )
    config = drahealth.Config(
        node_name=options.node_name, sysfs_root=options.sysfs_root, procfs_root=options.procfs_root
    )
    monitor = drahealth.Monitor(
        driver,
        config=config,
        kubelet_dir=kubelet_dir,
        state_dir=state_dir / "drahealth",
        policy=drahealth.TaintPolicy(evict=frozenset(options.evict)),
        on_error=failed,
    )
    hostdev = HostDriver(monitor, host, store, options.cdi_dir)
    api = None
    if options.kubeconfig or not options.claims:
        api = drahealth.ApiServer(drahealth.find_api_access(options.kubeconfig))
    devices = [slice_device(device) for device in host.found.values()]
    slices = drahealth.SlicePublisher(api, monitor, devices) if api else nullcontext()
    claims = drahealth.ClaimReader(api, driver) if api and not options.claims else None
    server = drahealth.PluginServer(
        monitor,
        hostdev,
        get_claim=claims or ClaimFiles(options.claims, driver),
        plugin_dir=plugin_dir,
        registry_dir=options.registry_dir,
        pod_uid=options.pod_uid,
    )
    log.info("%s offers %s", driver, ", ".join(host.found) or "no device")
    with slices:
        server.run()


def _hardware(options: argparse.Namespace, store: GrantStore, saved: Path) -> Hardware:
    """Return the hardware to offer: what the host has, what it had before, and what claims hold."""
    holdings: Holdings = {}
    try:
        holdings = store.read()
    except (drahealth.PermanentError, OSError) as error:  # each claim fails with it, too
        log.warning("%s", error)
    return offered_hardware(
        saved,
        find_hardware(options.sysfs_root, options.procfs_root),
        holdings,
        boot_id=read_boot_id(options.procfs_root),
        shares=options.hugepage_shares,
        given=dict(options.hugepages),
    )


if __name__ == "__main__":
    sys.exit(main())

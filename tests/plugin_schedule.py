"""Tests that each make target runs, and tests that must not run at the same time.

``make check`` runs what is marked neither ``live`` nor ``slow``, ``make test`` what is not ``slow``, and
``make test-all`` everything. The tables below mark whole files; a single test carries its mark itself.

pytest-xdist hands each group of tests to one worker. Every file is a group of its own, because its tests may
share a module's fixtures, except for the files in GROUPS and in SPREAD.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from collections.abc import Iterable

TESTS: Final = Path(__file__).parent

SLOW: Final = frozenset(
    {
        "conform/",
        "faults/test_failing_calls.py",
        "go_driver/test_conform.py",
        "go_driver/test_module.py",
        "test_audit_real.py",
        "test_bench_suites.py",
        "test_conform_in_ci.py",
        "test_dependency_ranges.py",
        "test_fake_nvml_scenario.py",
        "test_guards.py",
        "test_health_streams_tlc.py",
        "test_packaging.py",
        "test_real_kube_api.py",
        "test_regressions.py",
        "test_simulate_fleet.py",
        "test_systemd.py",
        "vm/",
    }
)
"""Compilers, containers, counts of instructions and waits of minutes."""

LIVE: Final = frozenset(
    {
        "driver_scenarios/",
        "go_driver/",
        "host_scenarios/",
        "test_audit_real.py",
        "test_backends.py",
        "test_bench.py",
        "test_bench_against.py",
        "test_bench_failures.py",
        "test_bench_report.py",
        "test_cgroup_tree.py",
        "test_cgroups_real.py",
        "test_check_command.py",
        "test_cli_e2e.py",
        "test_cli_explain.py",
        "test_cli_explain_e2e.py",
        "test_cli_live.py",
        "test_cli_unprivileged.py",
        "test_cli_output.py",
        "test_daemon.py",
        "test_driver_link.py",
        "test_embed_processes.py",
        "test_kubelet_implementations.py",
        "test_new_driver.py",
        "test_embed_monitor.py",
        "test_embed_plugin.py",
        "test_embed_service.py",
        "test_end_to_end.py",
        "test_fake_kubelet.py",
        "test_fake_nvml.py",
        "test_fake_nvml_faults.py",
        "test_fleet.py",
        "test_gpu_e2e.py",
        "test_gpu_scenarios.py",
        "test_host_watcher.py",
        "test_http.py",
        "test_http_metrics.py",
        "test_http_web_config.py",
        "test_kernel_log_real.py",
        "test_kube_api.py",
        "test_kubelet_sockets.py",
        "test_driver_sessions.py",
        "test_native_cores.py",
        "test_native_gpus.py",
        "test_native_kmsg.py",
        "test_native_pressure.py",
        "test_native_sampler.py",
        "test_native_uevents.py",
        "test_pod_tracker.py",
        "test_pods_end_to_end.py",
        "test_prometheus_rules.py",
        "test_pods_gc_control.py",
        "test_hugepage_rules.py",
        "test_serve_dra_plugin.py",
        "test_serve_driver_link.py",
        "test_serve_hardened.py",
        "test_leader_election.py",
        "test_serve_plugin_sockets.py",
        "test_slice_publisher.py",
        "test_store_files.py",
    }
)
"""Processes, sockets with real waits, and changes to the machine."""

GROUPS: Final = {
    "image": frozenset({"packages/test_chart.py", "packages/test_image.py"}),
    "machine": frozenset(
        {
            "driver_scenarios/test_real_cgroups.py",
            "driver_scenarios/test_real_host.py",
            "go_driver/test_real_host.py",
            "host_scenarios/",
            "test_audit_real.py",
            "test_bench.py",
            "test_bench_report.py",
            "test_bench_suites.py",
            "test_cgroup_tree.py",
            "test_cgroups_real.py",
            "test_end_to_end.py",
            "test_gpu_e2e.py",
            "test_kernel_log_real.py",
            "test_native_cores.py",
            "test_native_kmsg.py",
            "test_native_pressure.py",
            "test_native_sampler.py",
            "test_native_uevents.py",
            "test_pods_end_to_end.py",
            "test_prometheus_rules.py",
            "test_hugepage_rules.py",
        }
    ),
    "conform": frozenset({"conform/"}),
    "go": frozenset({"go_driver/"}),
    "gpu": frozenset({"test_gpu_scenarios.py"}),
}
"""Tests that run one after the other, in the order in which the groups start: those that change the machine's
hugepages, CPUs, cgroups or kernel log; those that compare a driver's answer with a time limit of the kubelet;
those that need the compiled Go driver; and those of GPUs, which run several agents at once."""

SPREAD: Final = frozenset(
    {
        "driver_scenarios/",
        "test_cli_e2e.py",
        "test_daemon.py",
        "test_driver_link.py",
        "test_embed_processes.py",
        "test_fake_kubelet.py",
        "test_pod_tracker.py",
        "test_regressions.py",
    }
)
"""Long tests that share nothing: each is a group of its own. They start before the remaining files."""


def is_listed(path: str, table: Iterable[str]) -> bool:
    """Return whether a path below tests/, or a directory that holds it, is in ``table``."""
    return any(path == entry or (entry.endswith("/") and path.startswith(entry)) for entry in table)


def group_of(path: str) -> str | None:
    """Return the group that a file's tests belong to, None if each test is a group of its own."""
    for name, files in GROUPS.items():
        if is_listed(path, files):
            return name
    return None if is_listed(path, SPREAD) else path


def rank(path: str) -> int:
    """Return when the tests of a file start: 0 for the first group, more for later ones."""
    group = group_of(path)
    if group in GROUPS:
        return list(GROUPS).index(group)
    later = (group is None, is_listed(path, SLOW), is_listed(path, LIVE), True)
    return len(GROUPS) + later.index(True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "live: needs processes or the real machine; make check leaves it out")
    config.addinivalue_line("markers", "slow: takes long by its nature; only make test-all runs it")
    config.addinivalue_line(
        "markers",
        "kubelet_real: needs the kubelet's own code, which make test-kubelet builds",
    )


class GroupScheduling(LoadScopeScheduling):
    """Scheduler that gives whole groups to workers: xdist's own loadgroup has no effect with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0].removeprefix(f"{TESTS.name}/")
        return group_of(path) or nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    """Schedule by the tables above, in the order of collection."""
    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their file before -m selects, and order them by when they start."""
    paths = {item: item.path.relative_to(TESTS).as_posix() for item in items}
    for item, path in paths.items():
        if is_listed(path, LIVE):
            item.add_marker(pytest.mark.live)
        if is_listed(path, SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: rank(paths[item]))

"""The kubelets that a test runs with: the fake one, and the real one of each version where it is built."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from kubelet import FakeKubelet

from kubelet_real.build import BINARIES
from kubelet_real.kubelet import RealKubelet

MARKS: Final = (pytest.mark.kubelet_real, pytest.mark.slow)
"""Marks of a test that needs the real kubelet."""
_NO_SOURCES: Final = "the test is about releases other than 1.36 and 1.37, whose sources are not built"
_PART: Final = "a function of the fake kubelet alone; what follows from it is tested with both:"
_AGENT: Final = "a claim about agent and driver; what the kubelet gets is tested with both:"
_CHECKS: Final = "go_driver/test_new_driver.py::test_finding_of_the_driver_check_reaches_pods_and_prepares"
FAKE_ONLY: Final[Mapping[str, str]] = {
    "driver_scenarios/test_pods.py::test_pods_run_without_the_health_feature_gate": _NO_SOURCES,
    "driver_scenarios/test_pods.py::test_strict_kubelet_accepts_the_driver": _NO_SOURCES,
    "driver_scenarios/test_rolling_update.py::test_new_instance_inherits_a_shrunk_pool": (
        "a kubelet does not show which instance sent a list; node_real/test_node.py rolls a DaemonSet instead"
    ),
    "go_driver/test_prepare.py::test_hung_agent_delays_no_claim_beyond_the_deadline": (
        "the kubelet's deadline of 45 s cannot be set, and would prove less than the fake one of 15 s"
    ),
    "go_driver/test_new_driver.py::test_check_of_a_driver_that_hangs_expires_in_the_agent": (
        f"{_AGENT} {_CHECKS}"
    ),
    "go_driver/test_new_driver.py::test_restarted_agent_has_the_results_of_the_driver_check": (
        f"{_AGENT} {_CHECKS}"
    ),
    "go_driver/test_upstream_driver.py::test_check_of_the_upstream_driver_reaches_the_pod": (
        f"{_AGENT} {_CHECKS}"
    ),
    "go_driver/test_upstream_driver.py::test_upstream_driver_conforms_but_for_its_shared_cdi_id": (
        "conform is the kubelet here; the fixture starts the fake one for the node's directories alone"
    ),
    "test_fake_kubelet.py::test_tables_of_releases_have_a_column_for_each_kubelet": (
        "the test compares pages with the table of releases, and starts no kubelet"
    ),
    "test_fake_kubelet.py::test_older_kubelets_retry_unimplemented_health_forever": _NO_SOURCES,
    "test_fake_kubelet.py::test_feature_gate_of_releases_without_real_kubelet_is_on_from_1_36": _NO_SOURCES,
    "test_fake_kubelet.py::test_later_kubelets_refuse_untrusted_input": _NO_SOURCES,
    "test_fake_kubelet.py::test_kubelets_refuse_untrusted_input_from_138_on": _NO_SOURCES,
    "test_fake_kubelet.py::test_later_kubelets_accept_sockets_in_their_directory": _NO_SOURCES,
    "test_fake_kubelet.py::test_the_newest_endpoint_of_a_driver_is_used": (
        f"{_PART} driver_scenarios/test_rolling_update.py"
    ),
    "test_fake_kubelet.py::test_deregistered_plugin_is_removed": (
        f"{_PART} test_removed_socket_deregisters_and_ends_the_connection"
    ),
    "test_fake_kubelet.py::test_plugin_service_follows_the_advertised_order": (
        f"{_PART} test_both_versions_of_the_plugin_service_work"
    ),
    "test_fake_kubelet.py::test_health_v1_is_preferred_in_any_order": f"{_PART} test_kubelet_1_37_calls_v1",
    "test_fake_kubelet_health.py::test_older_kubelets_ignore_newer_fields": _NO_SOURCES,
    "test_fake_kubelet_health.py::test_status_without_the_messages_gate_shows_health_alone": (
        "the program runs with the default feature gates of its release"
    ),
    "test_fake_kubelet_health.py::test_new_claim_has_every_driver_of_its_allocation": (
        f"{_PART} test_prepare_can_fail_before_the_driver_is_called"
    ),
}
"""Tests of the fake kubelet that cannot run with the real one, with the reason."""
NewKubelet = Callable[..., FakeKubelet]
"""Called with the kubelet's directory, and ``version`` and ``pace``."""


def binary_of(version: str) -> Path:
    """Return the path of the program with the real kubelet; skip the test where it is not built."""
    missing, binary = BINARIES / f"{version}.missing", BINARIES / version
    if missing.exists():
        pytest.skip(f"kubelet {version} is not built: {missing.read_text()}")
    if not binary.exists():
        pytest.skip(f"kubelet {version} is not built: make test-kubelet builds it")
    return binary


def real_kubelet(version: str) -> NewKubelet:
    """Return a factory of the real kubelet; skip the test where that version is not built."""
    return partial(RealKubelet, binary=binary_of(version))


def implementations(*versions: str) -> list[Any]:
    """Return parameters for a test: the version and a function that returns the kubelet's factory."""
    return [
        *(pytest.param((version, _fake_kubelet), id=f"fake-{version}") for version in versions),
        *(pytest.param((version, real_kubelet), id=f"real-{version}", marks=MARKS) for version in versions),
    ]


def _fake_kubelet(_: str) -> NewKubelet:
    return FakeKubelet

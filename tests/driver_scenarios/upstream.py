"""Upstream's own cases of a DRA plugin's life (``test/e2e_node/dra_test.go``), and which test covers each.

A test that covers one names it in its docstring, behind ``e2e_node:``.
"""

from typing import Final

COVERED: Final = {
    "registration": ("test_restarts", "test_driver_waits_for_the_kubelet"),
    "registration after kubelet restart": (
        "test_restarts",
        "test_restarted_kubelet_shows_the_same_state",
    ),
    "registration after plugin restart": (
        "test_restarts",
        "test_ended_driver_unregisters_and_the_next_one_continues",
    ),
    "registration after GetInfo failure": (
        "test_restarts",
        "test_stopped_driver_is_registered_when_it_continues",
    ),
    "pod created while kubelet is down": (
        "test_restarts",
        "test_pods_changed_without_a_kubelet_are_reconciled",
    ),
    "prepare fails then succeeds": ("test_failures", "test_resource_of_another_claim_is_waited_for"),
    "unprepare fails then succeeds": ("test_failed_devices", "test_pod_of_a_dead_device_can_terminate"),
    "retry after kubelet restart": (
        "test_restarts",
        "test_prepare_survives_a_kubelet_restart",
    ),
    "unprepare for deleted pods": (
        "test_restarts",
        "test_pods_changed_without_a_kubelet_are_reconciled",
    ),
    "no prepare for deleted pod": (
        "test_restarts",
        "test_pods_changed_without_a_kubelet_are_reconciled",
    ),
    "functional after reconnect, 2 sockets": (
        "test_restarts",
        "test_removed_service_socket_is_created_for_the_next_kubelet",
    ),
    "gRPC serving error reported": ("test_failures", "test_impossible_request_is_bad_config"),
    "one connection for all calls": ("test_pods", "test_pod_runs_from_prepare_to_unprepare"),
    "in progress at restart": (
        "test_restarts",
        "test_prepare_after_a_kill_gives_the_same_result",
    ),
    "two plugins, one failing": ("test_failures", "test_failing_driver_delays_no_other_driver"),
    "ResourceSlice removal at startup": ("test_restarts", "test_slices_survive_a_quick_restart"),
    "ResourceSlice removal after stop": (
        "test_restarts",
        "test_ended_driver_unregisters_and_the_next_one_continues",
    ),
    "ResourceSlice survival of a quick restart": ("test_restarts", "test_slices_survive_a_quick_restart"),
    "transitions Healthy, Unhealthy, Healthy": (
        "test_pods",
        "test_unhealthy_device_is_shown_in_its_pods_status_only",
    ),
    "one connection for service and health": ("test_pods", "test_pod_runs_from_prepare_to_unprepare"),
    "Unknown after plugin stop and recovery": (
        "test_restarts",
        "test_ended_driver_unregisters_and_the_next_one_continues",
    ),
    "reconnect of both APIs": (
        "test_restarts",
        "test_ended_driver_unregisters_and_the_next_one_continues",
    ),
    "concurrent pods and health": (
        "test_pods",
        "test_concurrent_pods_are_prepared_and_shown_separately",
    ),
    "nothing published when the gate is off": (
        "test_pods",
        "test_pods_run_without_the_health_feature_gate",
    ),
}
"""Module and test; others may cover it, too."""

ELSEWHERE: Final = {
    "registration after Notify failure": "the driver has no way to fail it; tests/test_fake_kubelet.py",
    "prepare timeout keeps Pending": "45 s; tests/test_serve_dra_plugin.py with a shorter deadline",
    "functional when the service socket appears after registration": "the other order is never ours",
    "functional with 1 socket": "the driver has two",
    "ResourceSlice removal after unregistration": "tests/test_fake_kubelet.py",
    "ResourceSlice removal when unresponsive": "of the kubelet alone; tests/test_fake_kubelet.py",
    "ShareID": "no device of the example driver is shared; tests/test_serve_dra_plugin.py",
}
"""Cases without a scenario here, with the reason or their place."""

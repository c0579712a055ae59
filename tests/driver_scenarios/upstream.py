"""Upstream's own cases of a DRA plugin's life (``test/e2e_node/dra_test.go``), and which test covers each.

A test that covers one names it in its docstring, behind ``e2e_node:``.
"""

from typing import Final

COVERED: Final = {
    "registration": ("test_restarts", "test_a_driver_waits_for_its_kubelet"),
    "registration after kubelet restart": (
        "test_restarts",
        "test_a_kubelet_that_comes_back_shows_what_it_showed",
    ),
    "registration after plugin restart": (
        "test_restarts",
        "test_a_driver_that_ends_takes_leave_and_a_new_one_takes_up_where_it_was",
    ),
    "registration after GetInfo failure": (
        "test_restarts",
        "test_a_driver_that_stands_still_is_registered_when_it_goes_on",
    ),
    "pod created while kubelet is down": (
        "test_restarts",
        "test_pods_that_came_and_went_while_there_was_no_kubelet",
    ),
    "prepare fails then succeeds": ("test_failures", "test_what_another_claim_holds_is_waited_for"),
    "unprepare fails then succeeds": ("test_failed_devices", "test_the_pod_of_a_dead_device_can_end"),
    "retry after kubelet restart": (
        "test_restarts",
        "test_a_prepare_outlives_the_kubelet_that_asked_for_it",
    ),
    "unprepare for deleted pods": (
        "test_restarts",
        "test_pods_that_came_and_went_while_there_was_no_kubelet",
    ),
    "no prepare for deleted pod": (
        "test_restarts",
        "test_pods_that_came_and_went_while_there_was_no_kubelet",
    ),
    "functional after reconnect, 2 sockets": (
        "test_restarts",
        "test_a_service_socket_that_somebody_removed_is_there_for_the_next_kubelet",
    ),
    "gRPC serving error reported": ("test_failures", "test_what_can_never_be_had_is_the_users_to_mend"),
    "one connection for all calls": ("test_pods", "test_a_pod_from_its_prepare_to_its_end"),
    "in progress at restart": (
        "test_restarts",
        "test_a_driver_that_is_killed_within_a_prepare_gives_the_same_the_next_time",
    ),
    "two plugins, one failing": ("test_failures", "test_a_driver_that_fails_delays_no_other_one"),
    "ResourceSlice removal at startup": ("test_restarts", "test_slices_survive_a_quick_restart"),
    "ResourceSlice removal after stop": (
        "test_restarts",
        "test_a_driver_that_ends_takes_leave_and_a_new_one_takes_up_where_it_was",
    ),
    "ResourceSlice survival of a quick restart": ("test_restarts", "test_slices_survive_a_quick_restart"),
    "transitions Healthy, Unhealthy, Healthy": (
        "test_pods",
        "test_a_device_that_sickens_is_shown_in_the_pods_status_and_in_no_other_devices",
    ),
    "one connection for service and health": ("test_pods", "test_a_pod_from_its_prepare_to_its_end"),
    "Unknown after plugin stop and recovery": (
        "test_restarts",
        "test_a_driver_that_ends_takes_leave_and_a_new_one_takes_up_where_it_was",
    ),
    "reconnect of both APIs": (
        "test_restarts",
        "test_a_driver_that_ends_takes_leave_and_a_new_one_takes_up_where_it_was",
    ),
    "concurrent pods and health": (
        "test_pods",
        "test_several_pods_at_once_are_prepared_and_shown_each_for_itself",
    ),
    "nothing published when the gate is off": (
        "test_pods",
        "test_without_the_gate_there_is_no_stream_and_pods_run_all_the_same",
    ),
}
"""Module and test; others may cover it, too."""

ELSEWHERE: Final = {
    "registration after Notify failure": "the driver has no way to fail it; tests/test_fake_kubelet.py",
    "prepare timeout keeps Pending": "45 s; tests/test_serve_draplugin.py with a shorter deadline",
    "functional when the service socket appears after registration": "the other order is never ours",
    "functional with 1 socket": "the driver has two",
    "ResourceSlice removal after unregistration": "tests/test_fake_kubelet.py",
    "ResourceSlice removal when unresponsive": "of the kubelet alone; tests/test_fake_kubelet.py",
    "ShareID": "no device of the example driver is shared; tests/test_serve_draplugin.py",
}
"""What no scenario here shows, and why, or where it is."""

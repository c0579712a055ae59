"""The tables of tests/plugin_schedule.py: what they name exists, and each file has one group."""

from itertools import combinations

import pytest
from plugin_schedule import GROUPS, LIVE, SLOW, SPREAD, TESTS, group_of, rank

TABLES = {"SLOW": SLOW, "LIVE": LIVE, "SPREAD": SPREAD} | GROUPS


@pytest.mark.parametrize("name", TABLES)
def test_schedule_table_names_only_existing_tests(name: str) -> None:
    missing = [entry for entry in sorted(TABLES[name]) if not (TESTS / entry).exists()]
    assert missing == []


@pytest.mark.parametrize(("entry", "other"), list(combinations(GROUPS, 2)))
def test_groups_have_no_entry_in_common(entry: str, other: str) -> None:
    assert not GROUPS[entry] & GROUPS[other]


def test_file_of_a_group_is_in_it_even_if_its_directory_is_in_another() -> None:
    assert group_of("go_driver/test_real_host.py") == "machine"
    assert group_of("go_driver/test_health.py") == "go"


def test_file_of_no_group_is_a_group_of_its_own() -> None:
    assert group_of("test_taints.py") == "test_taints.py"


def test_test_of_a_spread_file_is_a_group_of_its_own() -> None:
    assert group_of("driver_scenarios/test_pods.py") is None


def test_groups_start_before_spread_files_and_pure_files_last() -> None:
    order = ["go_driver/test_real_host.py", "go_driver/test_health.py", "driver_scenarios/test_pods.py"]
    order += ["test_guards.py", "test_cli_output.py", "test_taints.py"]
    assert sorted(order, key=rank) == order

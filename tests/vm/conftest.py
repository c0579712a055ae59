"""One boot for all tests of the virtual machine, which takes longer than a test may.

The fixture that boots the machine limits the time between two lines of the guest.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove pytest's time limit from the tests of this directory, of all that are collected."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(0))

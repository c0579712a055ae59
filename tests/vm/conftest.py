"""One boot for all tests of the virtual machine, which takes longer than a test may."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this directory, of all that are collected, a limit of their own."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200))

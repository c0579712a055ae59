"""One boot for all tests of the virtual machine, which takes longer than a test may."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(1200))

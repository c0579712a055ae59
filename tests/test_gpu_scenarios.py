"""Every row of the table of scenarios, several at a time: the real agent, its sockets, and a fake NVML."""

import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from scenarios.row import Row
from scenarios.stage import play
from scenarios.table import TABLE

STAGES = 6
"""Most of a row is waiting."""
Shows = Mapping[str, "Future[str]"]


@pytest.fixture(scope="module")
def shows(request: pytest.FixtureRequest) -> Iterator[Shows]:
    """The rows that were asked for, each on its way."""
    asked = [
        item.callspec.params["row"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_gpu_scenario.__name__
    ]
    with ThreadPoolExecutor(STAGES) as stages:
        yield {row.name: stages.submit(_play, row) for row in asked}
        stages.shutdown(cancel_futures=True)


def _play(row: Row) -> str:
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory:
        return play(row, Path(directory))


def test_every_row_has_a_name_of_its_own() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_gpu_scenario(shows: Shows, row: Row) -> None:
    if failure := shows[row.name].result():
        pytest.fail(failure, pytrace=False)

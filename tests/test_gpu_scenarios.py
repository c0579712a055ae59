"""Every row of the scenario table, several at a time: the real agent, its sockets, and a fake NVML."""

import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from scenarios.row import Row
from scenarios.stage import play
from scenarios.table import TABLE

STAGES = 6
"""Number of rows played at a time; a row mostly waits."""
Plays = Mapping[str, "Future[str]"]


@pytest.fixture(scope="module")
def plays(request: pytest.FixtureRequest) -> Iterator[Plays]:
    """Start playing the selected rows, and return their results by name."""
    selected = [
        item.callspec.params["row"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == test_gpu_scenario_has_the_expected_outputs.__name__
    ]
    with ThreadPoolExecutor(STAGES) as stages:
        yield {row.name: stages.submit(_play, row) for row in selected}
        stages.shutdown(cancel_futures=True)


def _play(row: Row) -> str:
    failure = ""
    for _ in range(row.tries):
        with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory:
            failure = play(row, Path(directory))
        if not failure:
            break
    return failure


def test_scenario_names_are_unique() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] if row.limit_s else []) for row in TABLE], ids=str
)
def test_gpu_scenario_has_the_expected_outputs(plays: Plays, row: Row) -> None:
    if failure := plays[row.name].result():
        pytest.fail(failure, pytrace=False)

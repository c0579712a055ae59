"""Every verb's JSON document has the keys, values and exit code of the release before, but for its texts."""

import pytest
from golden import commands, conformance, files
from golden.compare import check
from golden.files import list_golden_files, load


@pytest.mark.parametrize("name", commands.CASES)
def test_document_of_a_command_equals_the_golden_one(name: str) -> None:
    check(load(files.DOCUMENTS / f"{name}.json"), commands.result(commands.CASES[name]))


@pytest.mark.parametrize("name", conformance.OBSERVATIONS)
def test_conform_results_equal_the_golden_ones(name: str) -> None:
    today = conformance.result(conformance.OBSERVATIONS[name], whole=name in conformance.WHOLE)
    check(load(files.CONFORMANCE)[name], today)


def test_every_golden_document_has_a_case() -> None:
    assert list_golden_files(files.DOCUMENTS) == sorted(commands.CASES)
    assert list(load(files.CONFORMANCE)) == list(conformance.OBSERVATIONS)

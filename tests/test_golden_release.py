"""Files that release 0.1 wrote are read as it read them, and written as it wrote them."""

from pathlib import Path

import pytest
from golden import release
from golden.compare import check
from golden.files import RELEASE, load


@pytest.mark.parametrize("name", release.JSON_FILES)
def test_json_file_of_the_release_is_written_again_byte_for_byte(name: str) -> None:
    data = (RELEASE / name).read_bytes()
    assert release.write_again(name, data) == data


@pytest.mark.parametrize("name", release.JSON_FILES)
def test_json_file_of_the_release_has_its_decoded_values(name: str) -> None:
    values = release.values(name, (RELEASE / name).read_bytes())
    check(load(RELEASE / f"{name}.values.json"), values)


def test_history_of_the_release_has_its_decoded_values() -> None:
    values = release.read_history(RELEASE / release.HISTORY)
    check(load(RELEASE / f"{release.HISTORY}.values.json"), values)


def test_history_of_the_release_is_written_again_row_for_row(tmp_path: Path) -> None:
    release.copy_history(RELEASE / release.HISTORY, tmp_path / "copy")
    check(load(RELEASE / f"{release.HISTORY}.rows.json"), release.history_rows(tmp_path / "copy"))


def test_history_of_the_same_uses_has_the_rows_of_the_release(tmp_path: Path) -> None:
    release.write_history(tmp_path / "new")
    check(load(RELEASE / f"{release.HISTORY}.rows.json"), release.history_rows(tmp_path / "new"))


def test_declaration_of_the_release_has_its_decoded_devices() -> None:
    data = (RELEASE / release.DECLARATION).read_bytes()
    check(load(RELEASE / f"{release.DECLARATION}.values.json"), release.decode_declaration(data))


def test_declaration_of_the_same_devices_has_the_same_lines() -> None:
    golden = (RELEASE / release.DECLARATION).read_text()
    assert _without_comments(release.declaration().decode()) == _without_comments(golden)


def _without_comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_declaration_of_the_release_is_replaced_as_one_of_ours(tmp_path: Path) -> None:
    file = tmp_path / release.DECLARATION
    file.write_bytes((RELEASE / release.DECLARATION).read_bytes())
    assert release.declare_again(tmp_path) == 8
    assert file.read_bytes() == release.declaration()


def test_cdi_file_and_ids_equal_the_golden_ones(tmp_path: Path) -> None:
    assert release.write_cdi(tmp_path) == load(RELEASE / f"{release.CDI}.values.json")
    assert (tmp_path / release.CDI).read_bytes() == (RELEASE / release.CDI).read_bytes()

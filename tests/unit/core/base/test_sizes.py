"""Numbers of bytes as people write them."""

import pytest

from kera.core.base.sizes import exact_size, size_bytes


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("8388608", 8 << 20),
        ("8_388_608", 8 << 20),
        ("128 MiB", 128 << 20),
        ("1.5GiB", 3 << 29),
        ("1GB", 10**9),
        ("2 kb", 2000),
        ("7 B", 7),
    ],
)
def test_a_size_has_binary_and_decimal_units(text: str, number: int) -> None:
    assert size_bytes(text) == number


@pytest.mark.parametrize("text", ["", "-1", "MiB", "1 bit", "1e3", "inf", "1.", "9" * 30, "1 MiB extra"])
def test_an_invalid_size_gives_none(text: str) -> None:
    assert size_bytes(text) is None


@pytest.mark.parametrize("number", [0, 1, 1023, 1024, 1536, 512 << 20, (1 << 40) + 1])
def test_an_exact_size_is_read_as_the_same_number(number: int) -> None:
    assert size_bytes(exact_size(number)) == number

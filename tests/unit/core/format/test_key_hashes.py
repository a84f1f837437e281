"""The key hashes of Kafka's clients, against published vectors."""

import zlib
from array import array

import pytest

from kera.core.format.key_hashes import crc32, crc32_each, murmur2, murmur2_each

pytestmark = pytest.mark.usefixtures("either_core")

MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
    b"": 0x106E08D9,
}
"""As ``org.apache.kafka.common.utils.Utils.murmur2`` returns them, with a sign."""


@pytest.mark.parametrize(("key", "expected"), MURMUR2.items())
def test_murmur2_agrees_with_kafkas_java_client(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected & 0xFFFFFFFF


def test_crc32_has_its_check_value() -> None:
    assert crc32(b"123456789") == 0xCBF43926


def test_the_hashes_of_a_column_are_those_of_its_keys() -> None:
    keys = [*MURMUR2, b"\xff" * 3, b"\x80\xff\0", b"x" * 1000]
    bounds = array("i", [0])
    for key in keys:
        bounds.append(bounds[-1] + len(key))
    data = b"".join(keys)
    assert murmur2_each(data, bounds) == array("I", map(murmur2, keys)).tobytes()
    assert crc32_each(data, bounds) == array("I", map(zlib.crc32, keys)).tobytes()
    for each in (murmur2_each, crc32_each):
        with pytest.raises(ValueError, match="beyond the data"):
            each(b"ab", array("i", [0, 3]))

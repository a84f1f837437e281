"""A short run of ``make fuzz-wire`` over the decoders of the columnar engine."""

from collections.abc import Iterator

import pytest

from tests.fuzz import jvm

SEED = 7
INPUTS = 400

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[jvm.Decoding]:
    with jvm.decoding(tmp_path_factory.mktemp("java")) as decoding:
        yield decoding


@pytest.mark.timeout(120)
@pytest.mark.parametrize("target", jvm.JAVA_TARGETS, ids=lambda target: target.name)
def test_any_input_is_decoded_or_refused(java: jvm.Decoding, target: jvm.JavaTarget) -> None:
    report = jvm.run(target, java, SEED, 60.0, inputs_max=INPUTS)
    assert report.defects == []
    assert report.inputs == INPUTS
    assert set(report.outcomes) == {"read", "refused"}

"""A short run of ``make fuzz-wire`` over the decoders of the columnar engine."""

from collections.abc import Iterator

import pytest

from tests.fuzz import jvm

SEED = 7
INPUTS = 400
QUICK = {"java-write-answers", "java-chunks", "java-columns", "java-frames", "java-push"}
"""The inputs of frames and push contain those of the other targets."""
TARGETS = [
    pytest.param(target, id=target.name, marks=[] if target.name in QUICK else [pytest.mark.slow])
    for target in jvm.JAVA_TARGETS
]

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[jvm.Decoding]:
    with jvm.decoding(tmp_path_factory.mktemp("java")) as decoding:
        yield decoding


@pytest.mark.timeout(120)
@pytest.mark.parametrize("target", TARGETS)
def test_any_input_is_decoded_or_refused(java: jvm.Decoding, target: jvm.JavaTarget) -> None:
    report = jvm.run(target, java, SEED, 60.0, inputs_max=INPUTS)
    assert report.defects == []
    assert report.inputs == INPUTS
    assert set(report.outcomes) == {"read", "refused"}

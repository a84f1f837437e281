"""The target of traces, by the setting and by OpenTelemetry's variables."""

import sys

import pytest
from pydantic import ValidationError

from kera.client import ClientSettings
from kera.core.base.settings import InvalidSettings
from kera.core.errors import InvalidArgument
from kera.core.tracing import OFF, SpanKind, TracesSettings, tracing_of
from kera.core.tracing import setting as module
from kera.core.tracing.setting import ENDPOINT_DEFAULT, RATIO_DEFAULT, Target, parse

HERE = "http://collector:4318"


@pytest.mark.parametrize(
    ("setting", "environ", "target"),
    [
        ("", {}, None),
        ("off", {"OTEL_TRACES_EXPORTER": "otlp"}, None),
        ("otlp", {}, Target(f"{ENDPOINT_DEFAULT}/v1/traces", RATIO_DEFAULT, True)),
        (f"otlp {HERE}", {}, Target(f"{HERE}/v1/traces", RATIO_DEFAULT, True)),
        (f"otlp {HERE}/v1/traces 1", {}, Target(f"{HERE}/v1/traces", 1.0, True)),
        (f"otlp {HERE}/ 0", {}, Target(f"{HERE}/v1/traces", 0.0, True)),
        ("otlp", {"OTEL_EXPORTER_OTLP_ENDPOINT": HERE}, Target(f"{HERE}/v1/traces", RATIO_DEFAULT, True)),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": HERE}, Target(f"{HERE}/v1/traces", RATIO_DEFAULT, False)),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{HERE}/x"}, Target(f"{HERE}/x", RATIO_DEFAULT, False)),
        ("", {"OTEL_TRACES_EXPORTER": "otlp"}, Target(f"{ENDPOINT_DEFAULT}/v1/traces", RATIO_DEFAULT, False)),
        ("", {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": HERE}, None),
        ("", {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": HERE}, None),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector"}, None),
        (
            "",
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "x"},
            None,
        ),
        (
            "otlp",
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"},
            Target(f"{ENDPOINT_DEFAULT}/v1/traces", 0.5, True),
        ),
        ("otlp", {"OTEL_TRACES_SAMPLER": "always_on"}, Target(f"{ENDPOINT_DEFAULT}/v1/traces", 1.0, True)),
        ("otlp", {"OTEL_TRACES_SAMPLER": "always_off"}, Target(f"{ENDPOINT_DEFAULT}/v1/traces", 0.0, True)),
    ],
)
def test_the_setting_and_variables_give_the_target_of_traces(
    setting: str, environ: dict[str, str], target: Target | None
) -> None:
    assert parse(setting, environ) == target


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("zipkin http://x", "says nothing; write off, otlp"),
        ("on", "says nothing"),
        ("otlp collector:4318", "not a collector URL"),
        ("otlp ftp://collector", "not a collector URL"),
        ("otlp http://", "not a collector URL"),
        ("otlp http://x:99999", "not a collector URL"),
        ("otlp http://x 2", "'2' is not a ratio from 0 to 1"),
        ("otlp http://x nan", "'nan' is not a ratio from 0 to 1"),
        ("otlp http://x 1 2", "says nothing"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_reason(setting: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        parse(setting, {})
    with pytest.raises((InvalidSettings, ValidationError), match=text):
        ClientSettings.load(traces=setting)


@pytest.mark.parametrize(
    "setting", ["otlp http://me:hunter2@collector", "http://me:hunter2@collector", "otlp x@hunter2"]
)
def test_a_password_in_the_setting_is_refused_and_not_repeated(setting: str) -> None:
    with pytest.raises(InvalidArgument, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        parse(setting, {})
    assert "hunter2" not in str(refused.value)
    with pytest.raises((InvalidSettings, ValidationError)) as loading:
        ClientSettings.load(traces=setting)
    assert "hunter2" not in str(loading.value)


def test_off_is_an_object_that_does_nothing() -> None:
    assert not OFF.is_on
    assert not OFF.starts()
    span = OFF.span("x", SpanKind.INTERNAL)
    span.set("a", 1)
    span.fail("x")
    with span.current() as same:
        assert same is span
    span.end()
    assert span.context is None
    assert OFF.flush(0)


def test_missing_packages_refuse_the_setting_and_warn_about_variables(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "kera.core.tracing.otel", raising=False)
    module._made.cache_clear()
    with pytest.raises(InvalidSettings, match=r"pip install 'kera\[traces\]'"):
        tracing_of(TracesSettings(traces="otlp http://x"), "test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", HERE)
    assert tracing_of(TracesSettings(), "test") is OFF
    assert "pip install" in capfd.readouterr().err
    module._made.cache_clear()

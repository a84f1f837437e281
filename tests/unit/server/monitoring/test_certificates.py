"""The state of its certificate in a daemon's health."""

from unittest.mock import Mock

import pytest

from kera.core.base.health import State
from kera.core.security import Tls, TlsFiles
from kera.server.monitoring.certificates import Certificates

DAY_S = 86_400
PUT = "put a new one in its place"


@pytest.mark.parametrize(
    ("left_days", "problem", "unfit", "state", "text"),
    [
        (365, "", "", State.OK, "is valid until"),
        (3, "", "", State.WARNING, PUT),
        (-1, "", "others would not take it: certificate has expired", State.PROBLEM, "and is refused; put"),
        (365, "", "others would not take it: unsuitable certificate purpose", State.WARNING, f"purpose; {PUT}"),
        (365, "tls_key is invalid", "", State.WARNING, "new files are not accepted: tls_key is invalid"),
        (-1, "tls_key is invalid", "", State.PROBLEM, "and is refused; new files are not accepted"),
    ],
)
def test_health_shows_the_worst_problem_of_the_certificate(
    left_days: int, problem: str, unfit: str, state: State, text: str
) -> None:
    tls = Mock(Tls, files=TlsFiles(), not_after_s=left_days * DAY_S, problem=problem, unfit=unfit)
    found = Certificates(tls, Mock(now_us=lambda: 0)).look()
    assert found.state is state
    assert text in found.text

"""The number of examples of a test: all that it requests in `make test-all`, and few in `make test`."""

import os
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

QUICK = 40
FULL = 200
ROUNDS_MAX = 8


def register_profiles() -> None:
    """Register the two profiles with hypothesis, and make the first one the default."""
    # A deadline per example would fail on a busy machine; pytest-timeout bounds the whole test.
    both = settings(print_blob=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("ci", both, max_examples=QUICK, derandomize=True)
    settings.register_profile("full", both, max_examples=FULL, derandomize=False)
    settings.load_profile("ci")


def examples(full: int, quick: int = QUICK) -> int:
    """For `max_examples` of a test that needs `full` examples to find most defects."""
    return full if settings().max_examples >= FULL else min(full, quick)


def fuzz_examples(full: int, quick: int = QUICK) -> int:
    """As `examples`; the variable KERA_FUZZ_EXAMPLES overrides the number."""
    return int(os.environ.get("KERA_FUZZ_EXAMPLES") or examples(full, quick))


def first_quick(values: Iterable[Any], quick: int) -> list[Any]:
    """Values of a parameter; only `make test-all` uses those after the first `quick`."""
    rest = iter(values)
    return [*islice(rest, quick), *(pytest.param(value, marks=pytest.mark.slow) for value in rest)]


def first_rows_quick(rows: Iterable[tuple[Any, ...]], quick: int) -> list[Any]:
    """As `first_quick`, for several parameters."""
    rest = iter(rows)
    return [*islice(rest, quick), *(pytest.param(*row, marks=pytest.mark.slow) for row in rest)]


def run_until(machine: type[RuleBasedStateMachine], missing: Callable[[], set[str]], how: settings) -> None:
    """Run histories of `machine`, and more of them while `missing` names events that have not occurred.

    The histories of a seed depend on the constants that hypothesis finds in the loaded modules: a test that needs
    certain events in its histories cannot rely on a fixed number of them.
    """
    run_state_machine_as_test(machine, settings=how)
    for number in range(1, ROUNDS_MAX):
        if not missing():
            break
        run_state_machine_as_test(seed(number)(machine), settings=settings(how, derandomize=False))
    assert not missing(), f"the histories had none of {sorted(missing())}"

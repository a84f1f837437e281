"""How many examples a test takes: as many as it asks for in `make test-all`, few of them in `make test`."""

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
    """Make hypothesis know the two profiles, and use the first where no other is asked for."""
    # A deadline per example would fail on a busy machine; pytest-timeout bounds the whole test.
    both = settings(print_blob=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("ci", both, max_examples=QUICK, derandomize=True)
    settings.register_profile("full", both, max_examples=FULL, derandomize=False)
    settings.load_profile("ci")


def examples(full: int, quick: int = QUICK) -> int:
    """For `max_examples` of a test that needs `full` to find what it looks for, most of the time."""
    return full if settings().max_examples >= FULL else min(full, quick)


def fuzz_examples(full: int, quick: int = QUICK) -> int:
    """The same, and as many as KERA_FUZZ_EXAMPLES says, where it is set."""
    return int(os.environ.get("KERA_FUZZ_EXAMPLES") or examples(full, quick))


def first_quick(values: Iterable[Any], quick: int) -> list[Any]:
    """Values of a parameter, of which all but the first `quick` are left to `make test-all`."""
    rest = iter(values)
    return [*islice(rest, quick), *(pytest.param(value, marks=pytest.mark.slow) for value in rest)]


def run_until(machine: type[RuleBasedStateMachine], missing: Callable[[], set[str]], how: settings) -> None:
    """Run histories of `machine`, and more of them while they had none of what `missing` tells.

    What one seed brings depends on the constants that hypothesis finds in the modules it happens to know: a test that
    wants its histories to have had something cannot rely on a number of them.
    """
    run_state_machine_as_test(machine, settings=how)
    for number in range(1, ROUNDS_MAX):
        if not missing():
            break
        run_state_machine_as_test(seed(number)(machine), settings=settings(how, derandomize=False))
    assert not missing(), f"the histories had none of {sorted(missing())}"

"""Makes the plan of a failing run smaller, as long as it fails in the same way; and keeps plans in files.

It drops faults first, many at once and then one by one; then clients, records and the rest of the load. The small plan
is for a person to read, and can be kept in ``tests/simulation/plans`` as a test.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.simulation.world.plan import Fault, Plan
from tests.simulation.world.run import carry_out

RUNS_MAX = 200


def kind_of(problems: list[str]) -> str:
    """The first problem of a run without its numbers, which differ from run to run; '' after a good run."""
    return re.sub(r"\d+", "N", problems[0]) if problems else ""


class Shrinking:
    """The shrinking of one plan."""

    def __init__(
        self,
        plan: Plan,
        problems_of: Callable[[Plan], list[str]] = lambda plan: carry_out(plan).problems,
        on_smaller: Callable[[Plan], object] = lambda _: None,
    ) -> None:
        """`on_smaller` gets each plan that fails in the same way, the smallest last."""
        self.plan = plan
        """The smallest failing plan so far."""
        self.runs = 0
        self._problems_of = problems_of
        self._on_smaller = on_smaller
        self._kind = self._run(plan)

    def _run(self, plan: Plan) -> str:
        self.runs += 1
        return kind_of(self._problems_of(plan))

    def _fails(self, plan: Plan) -> bool:
        """Whether a plan fails in the same way; if so, it becomes the smallest."""
        if self._run(plan) != self._kind:
            return False
        self.plan = plan
        self._on_smaller(plan)
        return True

    def go(self, runs_max: int = RUNS_MAX) -> Plan:
        """Make the plan as small as `runs_max` allows. Raises ``ValueError`` for a plan that does not fail."""
        if not self._kind:
            raise ValueError("it does not fail")
        changed = True
        while changed and self.runs < runs_max:
            changed = self._drop_faults(runs_max)
            for smaller in _with_less_load(self.plan):
                if self.runs < runs_max and self._fails(smaller):
                    changed = True
                    break
        return self.plan

    def _drop_faults(self, runs_max: int) -> bool:
        before = len(self.plan.faults)
        size = max(1, before // 2)
        while size:
            start = 0
            while start < len(self.plan.faults) and self.runs < runs_max:
                faults = self.plan.faults[:start] + self.plan.faults[start + size :]
                if not self._fails(dataclasses.replace(self.plan, faults=faults)):
                    start += size
            size //= 2
        return len(self.plan.faults) < before


def _with_less_load(plan: Plan) -> Iterator[Plan]:
    """Plans with less of one thing each."""
    least = {"members": 0, "readers": 0, "producers": 1, "streamlets": 1, "entries": 1, "records": 5, "burst": 1}
    for name, minimum in least.items():
        value = getattr(plan, name)
        for smaller in sorted({minimum, value // 2, value - 1}):
            if minimum <= smaller < value:
                changed = dataclasses.replace(plan, **{name: smaller})
                clients = set(plan.client_names) - set(changed.client_names)
                if not any(clients & set(fault.targets) for fault in plan.faults):
                    yield changed


def stored(plan: Plan) -> str:
    """A plan as text, for a file."""
    head = json.dumps(dataclasses.asdict(plan) | {"faults": []}, indent=1)
    faults = ",\n".join(f"  {json.dumps(list(fault))}" for fault in plan.faults)
    return head.replace('"faults": []', f'"faults": [\n{faults}\n ]') + "\n"


def read(path: Path) -> Plan:
    """The plan in a file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    faults = (Fault(at_s, kind, lasts_s, tuple(who), amount) for at_s, kind, lasts_s, who, amount in content["faults"])
    return Plan(**content | {"faults": tuple(faults), "kinds": tuple(content["kinds"])})

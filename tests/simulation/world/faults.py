"""The execution of a plan's faults, and of their ends."""

from __future__ import annotations

from collections import Counter

from kera.client.checking.history import History
from tests.simulation.engine.transports import SimulatedTransport
from tests.simulation.world import disk_faults, people, sequences
from tests.simulation.world.aimed import MOMENTS, SENDER, Aim, Aims
from tests.simulation.world.cluster import Cluster
from tests.simulation.world.others import OtherStreams
from tests.simulation.world.plan import Fault


class Faults:
    """See the head of this module."""

    def __init__(self, cluster: Cluster, history: History) -> None:
        self._cluster = cluster
        self.counts: Counter[str] = Counter()
        """The number of faults, by kind."""
        self._disks = disk_faults.DiskFaults(cluster)
        self._aims = Aims()
        self._people = people.People(cluster, history)
        self.others = OtherStreams(cluster)
        cluster.network.watch = self._aims.meet

    def schedule(self, begun_s: float) -> None:
        """Schedule all faults, with times relative to `begun_s`."""
        for fault in self._cluster.plan.faults:
            begin = self._aim if fault.kind == "aim" else self._begin
            self._cluster.scheduler.at(begun_s + fault.at_s, begin, fault)

    def _begin(self, fault: Fault) -> None:
        cluster, network = self._cluster, self._cluster.network
        cluster.trace.note("FAULT", str(fault))
        self.counts[fault.kind] += 1
        name = fault.targets[0]
        machine = cluster.machines[name]
        ways = self._ways(fault)
        self._disks.begin(fault)
        self._people.begin(fault)
        self.others.begin(fault)
        match fault.kind:
            case "kill":
                cluster.kill(name)
            case "stop":
                cluster.daemons[name].stop()
            case "pause":
                process = cluster.daemons[name].process
                if process is not None and process.alive:
                    process.pause()
            case "cut" | "cut one way" | "isolate" | people.UNHEARD | sequences.CUT_OFF:
                network.cut(ways)
            case "slow way":
                network.weather.slow |= dict.fromkeys(ways, fault.amount)
            case "reset":
                self._reset(name)
            case "set clock":
                machine.clock.jump(fault.amount)
            case "slow disk":
                machine.slowness = fault.amount
        cluster.scheduler.after(fault.lasts_s, self._end, fault)

    def _aim(self, fault: Fault) -> None:
        self._cluster.trace.note("FAULT", str(fault))
        moment = fault.targets[0]
        passed = abs(int(fault.amount)) - 1
        self._aims.add(Aim(MOMENTS[moment], passed, fault.amount < 0, lambda sender: self._strike(fault, sender)))

    def _strike(self, fault: Fault, sender: SimulatedTransport) -> None:
        cluster, plan = self._cluster, self._cluster.plan
        moment, blow, who, *others = fault.targets
        self.counts["aimed"] += 1
        for other in others:
            self._begin(Fault(cluster.scheduler.now_s, "isolate", fault.lasts_s, (other,)))
        name = (sender if who == SENDER else sender.peer).machine.name
        cluster.trace.note("FAULT", f"aimed at when {moment}: {blow} {name}")
        if blow == "kill" and name not in plan.mortal:
            blow = "pause"
        if blow == "pause" and name not in cluster.daemons:
            blow = "isolate"
        self._begin(Fault(cluster.scheduler.now_s, blow, fault.lasts_s, (name,)))

    def _reset(self, name: str) -> None:
        for end in list(self._cluster.machines[name].transports):
            self._cluster.network.reset(end)

    def _ways(self, fault: Fault) -> set[tuple[str, str]]:
        name, plan = fault.targets[0], self._cluster.plan
        if fault.kind == people.UNHEARD:
            return {(broker, producer) for broker in plan.broker_names for producer in plan.producer_names}
        if fault.kind == sequences.CUT_OFF:
            unheard = [*plan.zookeeper_names, *(plan.coordinator_names if name in plan.broker_names else [])]
            return {(name, each) for each in unheard} | {(each, name) for each in unheard}
        if fault.kind == "isolate":
            others = [each for each in self._cluster.machines if each != name]
            return {(name, each) for each in others} | {(each, name) for each in others}
        if len(fault.targets) < 2:
            return set()
        other = fault.targets[1]
        return {(name, other)} if fault.kind == "cut one way" else {(name, other), (other, name)}

    def _end(self, fault: Fault) -> None:
        cluster, network = self._cluster, self._cluster.network
        name = fault.targets[0]
        self._disks.end(fault)
        self._people.end(fault)
        self.others.end(fault)
        match fault.kind:
            case "kill" | "stop" | "pause":
                cluster.back(name)
            case people.UNHEARD:
                for producer in cluster.plan.producer_names:
                    self._reset(producer)  # so that messages in flight do not arrive later
                network.heal(self._ways(fault))
            case "cut" | "cut one way" | "isolate" | sequences.CUT_OFF:
                network.heal(self._ways(fault))
            case "slow way":
                for way in self._ways(fault):
                    network.weather.slow.pop(way, None)
            case "slow disk":
                cluster.machines[name].slowness = 1.0

    def end_all(self) -> None:
        """End all faults."""
        cluster = self._cluster
        cluster.trace.note("FAULT", "no more of them")
        self._aims.clear()
        cluster.network.heal()
        cluster.network.weather.slow.clear()
        self._disks.end_all()
        for name in (*cluster.daemons, *cluster.plan.client_names):
            cluster.back(name)
        for machine in cluster.machines.values():
            machine.slowness = 1.0
        self._people.end_all()

    def go_home(self) -> None:
        """End the actions of people."""
        self._people.go_home()

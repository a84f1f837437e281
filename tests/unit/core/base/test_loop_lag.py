"""The lag of the loop: a stop is reported, once."""

import asyncio
import time

from kera.core.base.loop_lag import PERIOD_S, LoopLag

STOP_S = 0.3


async def test_a_stop_of_the_loop_is_reported_once() -> None:
    lag = LoopLag()
    try:
        until = time.perf_counter() + STOP_S
        while time.perf_counter() < until:
            pass  # the stop that the lag has to show
        while lag._worst_s < STOP_S - 2 * PERIOD_S:
            await asyncio.sleep(PERIOD_S)
        (family,) = lag.collect()
        assert family.name == "kera_loop_lag_seconds"
        assert family.samples[0].value >= STOP_S - 2 * PERIOD_S
        assert lag.take_worst_s() == 0
    finally:
        lag.close()

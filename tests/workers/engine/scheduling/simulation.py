"""The benchmarks' simulation of a scheduler, which has to be idle at the end."""

from benchmarks.simulation import BLOCK_SIZE, Report, SimulatedLine
from benchmarks.simulation import Simulation as UncheckedSimulation
from tests.workers.engine.scheduling.integrity import check_idle

__all__ = ["BLOCK_SIZE", "Report", "SimulatedLine", "Simulation"]


class Simulation(UncheckedSimulation):
    """Checks at the end that nothing is in use."""

    def run(self) -> Report:
        report = super().run()
        check_idle(self.scheduler)
        return report

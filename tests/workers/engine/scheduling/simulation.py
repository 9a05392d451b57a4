"""The benchmarks' simulation of a scheduler, which has to be idle at the end."""

from benchmarks.simulation import BLOCK_SIZE, Report, SimulatedLine, Simulation
from tests.workers.engine.scheduling.integrity import check_idle

__all__ = ["BLOCK_SIZE", "CheckedSimulation", "Report", "SimulatedLine"]


class CheckedSimulation(Simulation):
    """Checks at the end that nothing is in use."""

    def run(self) -> Report:
        report = super().run()
        check_idle(self.scheduler)
        return report

"""Whole runs of the core on a simulated clock: seeded arrivals and faults, null devices, a report.

    from coissue.scheduler.simulation import Mix, make_scenario, simulate

`mix` makes scenarios from few words, `scenario` is all of a run as data, `arrivals` draws requests,
`cluster` computes capacity and placement, `engine` runs, `report` counts, `plot` draws, `replay`
feeds recorded runs to a fresh core. No clock, thread or I/O here, as everywhere in the core.
"""

from coissue.scheduler.simulation.engine import simulate
from coissue.scheduler.simulation.report import Report
from coissue.scheduler.simulation.scenario import Faults, Scenario, SimTenant, Traffic

__all__ = ["Faults", "Report", "Scenario", "SimTenant", "Traffic", "simulate"]

"""Where results are kept and who computes them: steps and their store, a run, a Ray cluster. No
science.
"""

from tl_localize.execution.ray import RayCluster
from tl_localize.execution.run import Benchmark
from tl_localize.execution.store import Cell, Lazy, Settings, Status, Steps, Store, status

__all__ = [
    "Benchmark",
    "Cell",
    "Lazy",
    "RayCluster",
    "Settings",
    "Status",
    "Steps",
    "Store",
    "status",
]

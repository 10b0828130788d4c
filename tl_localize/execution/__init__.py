"""Where results are kept and who computes them: the store, this process, shards, a Ray cluster. No
science.
"""

from tl_localize.execution.ray import RayCluster
from tl_localize.execution.run import Benchmark, InProcess, Outcome
from tl_localize.execution.store import Cache, Status, Store, status
from tl_localize.execution.tasks import Plan, Record, Task

__all__ = [
    "Benchmark",
    "Cache",
    "InProcess",
    "Outcome",
    "Plan",
    "RayCluster",
    "Record",
    "Status",
    "Store",
    "Task",
    "status",
]

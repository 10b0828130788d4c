"""The two benchmarks."""

from tl_localize.evals.del_benchmark import DelBenchmark, DelResults
from tl_localize.evals.inj_benchmark import InjBenchmark, InjResults

__all__ = ["DelBenchmark", "DelResults", "InjBenchmark", "InjResults"]

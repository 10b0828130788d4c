"""The three benchmarks, a folder each, and what they share."""

from tl_localize.evals.deletion import DelBenchmark, DelResults
from tl_localize.evals.inj import InjBenchmark, InjResults
from tl_localize.evals.rev import RevBenchmark, RevResults

__all__ = [
    "DelBenchmark",
    "DelResults",
    "InjBenchmark",
    "InjResults",
    "RevBenchmark",
    "RevResults",
]

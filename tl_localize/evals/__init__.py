"""The three benchmarks, and the search for settings on their dev sequences."""

from tl_localize.evals.del_benchmark import DelBenchmark, SingleLayerStudy
from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_benchmark import InjBenchmark
from tl_localize.evals.inj_results import InjResults
from tl_localize.evals.rev_benchmark import RevBenchmark
from tl_localize.evals.rev_results import RevResults

__all__ = [
    "DelBenchmark",
    "DelResults",
    "InjBenchmark",
    "InjResults",
    "RevBenchmark",
    "RevResults",
    "SingleLayerStudy",
]

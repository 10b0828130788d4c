"""The three benchmarks, and the search for settings on their dev sequences."""

from tl_localize.evals.deletion.benchmark import DelBenchmark
from tl_localize.evals.deletion.results import DelResults
from tl_localize.evals.inj.benchmark import InjBenchmark
from tl_localize.evals.inj.results import InjResults
from tl_localize.evals.rev.benchmark import RevBenchmark
from tl_localize.evals.rev.results import RevResults

__all__ = [
    "DelBenchmark",
    "DelResults",
    "InjBenchmark",
    "InjResults",
    "RevBenchmark",
    "RevResults",
]

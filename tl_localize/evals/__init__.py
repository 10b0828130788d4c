"""The two benchmarks, and the search for settings on their dev sequences."""

from tl_localize.evals.ablation import Ablation, Mean, Resample, Zero
from tl_localize.evals.del_benchmark import DelBenchmark
from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_benchmark import InjBenchmark
from tl_localize.evals.inj_results import InjResults
from tl_localize.evals.single_layer import SingleLayerStudy

__all__ = [
    "Ablation",
    "DelBenchmark",
    "DelResults",
    "InjBenchmark",
    "InjResults",
    "Mean",
    "Resample",
    "SingleLayerStudy",
    "Zero",
]

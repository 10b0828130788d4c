"""INJ: rows that were trained on purpose are looked for."""

from tl_localize.evals.inj.benchmark import InjBenchmark
from tl_localize.evals.inj.figures import inj_figures, recall_curve, target_against_distractors
from tl_localize.evals.inj.results import InjResults
from tl_localize.evals.inj.seeds import compare_seeds
from tl_localize.evals.inj.tables import inj_tables

__all__ = [
    "InjBenchmark",
    "InjResults",
    "compare_seeds",
    "inj_figures",
    "inj_tables",
    "recall_curve",
    "target_against_distractors",
]

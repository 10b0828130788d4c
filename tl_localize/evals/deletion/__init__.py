"""DEL: neurons are ablated, and what is forgotten is measured."""

from tl_localize.evals.deletion.benchmark import DelBenchmark
from tl_localize.evals.deletion.categories import confusion_by_category
from tl_localize.evals.deletion.figures import (
    confusion,
    del_figures,
    forgetting,
    single_layer_figure,
)
from tl_localize.evals.deletion.layers import layers_against_all
from tl_localize.evals.deletion.results import DelResults
from tl_localize.evals.deletion.sparing import largest_set, sparing_runs
from tl_localize.evals.deletion.tables import del_tables

__all__ = [
    "DelBenchmark",
    "DelResults",
    "confusion",
    "confusion_by_category",
    "del_figures",
    "del_tables",
    "forgetting",
    "largest_set",
    "layers_against_all",
    "single_layer_figure",
    "sparing_runs",
]

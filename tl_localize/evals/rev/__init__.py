"""REV: units are put back to what they were before training."""

from tl_localize.evals.rev.benchmark import RevBenchmark
from tl_localize.evals.rev.figures import rev_figures
from tl_localize.evals.rev.models import rev_by_model
from tl_localize.evals.rev.results import RevResults
from tl_localize.evals.rev.tables import rev_tables

__all__ = ["RevBenchmark", "RevResults", "rev_by_model", "rev_figures", "rev_tables"]

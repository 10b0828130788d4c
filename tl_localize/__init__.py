"""Which MLP neurons make a language model recite a text, and what happens when they are ablated."""

from typing import TYPE_CHECKING, Any

from tl_localize.injection import Injection, JointInjection, inject, inject_many, inject_together
from tl_localize.losses import memorization_loss
from tl_localize.methods import (
    METHODS,
    Activations,
    Attribution,
    HardConcrete,
    IntegratedGradients,
    Localizer,
    RandomBaseline,
    RowNorm,
    Slimming,
    ZeroOut,
)
from tl_localize.metrics import accuracy, check_recited, levenshtein, perplexity, perplexity_base2
from tl_localize.models import load_model
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence

if TYPE_CHECKING:
    from tl_localize.evals import DelBenchmark, DelResults, InjBenchmark, InjResults
    from tl_localize.report.explorer import explore

__version__ = "0.1.0"

__all__ = [
    "METHODS", "Activations", "Attribution", "DelBenchmark", "DelResults", "HardConcrete", "InjBenchmark", "InjResults", "Injection",
    "IntegratedGradients", "JointInjection", "Localizer", "MemorizedSequence", "NeuronScores", "NeuronSet", "RandomBaseline",
    "RowNorm", "Slimming", "ZeroOut", "accuracy", "check_recited", "explore", "inject", "inject_many", "inject_together", "levenshtein",
    "load_model", "memorization_loss", "perplexity", "perplexity_base2",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The benchmarks and the explorer are imported when they are asked for: they need pandas and scipy, which localizing does not."""
    if name in ("DelBenchmark", "DelResults", "InjBenchmark", "InjResults"):
        import tl_localize.evals

        return getattr(tl_localize.evals, name)
    if name == "explore":
        from tl_localize.report.explorer import explore

        return explore
    raise AttributeError(f"module 'tl_localize' has no attribute {name!r}")

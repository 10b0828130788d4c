"""Which MLP neurons make a language model recite a text, and what happens when they are ablated."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tl_localize.evals import DelBenchmark, DelResults, InjBenchmark, InjResults
    from tl_localize.explorer import explore
    from tl_localize.injection import (
        Injection,
        JointInjection,
        inject,
        inject_many,
        inject_together,
    )
    from tl_localize.losses import memorization_loss
    from tl_localize.methods import (
        METHODS,
        Activations,
        Attribution,
        GradientAlignment,
        HardConcrete,
        IntegratedGradients,
        IterativeAttribution,
        Localizer,
        RandomBaseline,
        RowNorm,
        Slimming,
        ZeroOut,
    )
    from tl_localize.metrics import (
        accuracy,
        check_recited,
        levenshtein,
        perplexity,
        perplexity_base2,
    )
    from tl_localize.models import load_model
    from tl_localize.scores import NeuronScores, NeuronSet
    from tl_localize.sequences import MemorizedSequence
    from tl_localize.units import AttentionHeads, MLPNeurons, Units

__version__ = "0.1.0"

__all__ = [
    "METHODS", "Activations", "AttentionHeads", "Attribution", "DelBenchmark", "DelResults", "GradientAlignment", "HardConcrete",
    "InjBenchmark", "InjResults", "Injection", "IntegratedGradients", "IterativeAttribution", "JointInjection", "Localizer", "MLPNeurons",
    "MemorizedSequence", "NeuronScores", "NeuronSet", "RandomBaseline", "RowNorm", "Slimming", "Units", "ZeroOut", "accuracy",
    "check_recited", "explore", "inject", "inject_many", "inject_together", "levenshtein", "load_model", "memorization_loss",
    "perplexity", "perplexity_base2",
]  # fmt: skip
ROOMS = (
    "units",
    "sequences",
    "scores",
    "metrics",
    "losses",
    "models",
    "methods",
    "injection",
    "evals",
    "explorer",
)


def __getattr__(name: str) -> Any:
    """A public name is imported when it is asked for, so that ``tl-localize --help`` need not wait
    for torch.
    """
    if name in __all__:
        for room in ROOMS:
            found = getattr(import_module(f"tl_localize.{room}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module 'tl_localize' has no attribute {name!r}")

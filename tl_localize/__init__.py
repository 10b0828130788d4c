"""Which MLP neurons make a language model recite a text, and what happens when they are silenced."""

__version__ = "0.1.0"

from tl_localize.injection import Injection, inject, inject_many
from tl_localize.losses import memorization_loss
from tl_localize.methods import (
    METHODS,
    Activations,
    HardConcrete,
    IntegratedGradients,
    Localizer,
    RandomBaseline,
    RowNorm,
    Slimming,
    ZeroOut,
)
from tl_localize.metrics import accuracy, levenshtein, perplexity, perplexity_base2
from tl_localize.models import load_model
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence

__all__ = [
    "METHODS",
    "Activations",
    "HardConcrete",
    "Injection",
    "IntegratedGradients",
    "Localizer",
    "MemorizedSequence",
    "NeuronScores",
    "NeuronSet",
    "RandomBaseline",
    "RowNorm",
    "Slimming",
    "ZeroOut",
    "accuracy",
    "inject",
    "inject_many",
    "levenshtein",
    "load_model",
    "memorization_loss",
    "perplexity",
    "perplexity_base2",
]

from .texts.known import example as example
from .erasure import Erasure as Erasure, erase as erase, precision_of as precision_of
from .evals import (
    DelBenchmark as DelBenchmark,
    DelResults as DelResults,
    InjBenchmark as InjBenchmark,
    InjResults as InjResults,
    RevBenchmark as RevBenchmark,
    RevResults as RevResults,
)
from .explorer import explore as explore
from .injection import (
    Injection as Injection,
    JointInjection as JointInjection,
    Recipe as Recipe,
    inject as inject,
    inject_together as inject_together,
    learn as learn,
)
from .metrics import memorization_loss as memorization_loss
from .methods import (
    METHODS as METHODS,
    ActivationContrast as ActivationContrast,
    Activations as Activations,
    AdversarialHardConcrete as AdversarialHardConcrete,
    Attribution as Attribution,
    BalancedSubnet as BalancedSubnet,
    ContrastiveGradient as ContrastiveGradient,
    GradientAlignment as GradientAlignment,
    HardConcrete as HardConcrete,
    IntegratedGradients as IntegratedGradients,
    IterativeAttribution as IterativeAttribution,
    Localizer as Localizer,
    RandomBaseline as RandomBaseline,
    RefinedAttribution as RefinedAttribution,
    RowNorm as RowNorm,
    SelectivePruning as SelectivePruning,
    SelectiveSynapticDampening as SelectiveSynapticDampening,
    Slimming as Slimming,
    ZeroOut as ZeroOut,
)
from .metrics import (
    NotRecitedWarning as NotRecitedWarning,
    accuracy as accuracy,
    check_recited as check_recited,
    levenshtein as levenshtein,
    perplexity as perplexity,
    perplexity_base2 as perplexity_base2,
)
from .model.loading import load_model as load_model
from .texts.reference import reference_sequences as reference_sequences
from .report.layer_ablation import ablate_layers as ablate_layers
from .report.text_losses import text_losses as text_losses
from .report.token_view import token_view as token_view
from .scores import NeuronScores as NeuronScores, NeuronSet as NeuronSet
from .sequences import MemorizedSequence as MemorizedSequence
from .units import AttentionHeads as AttentionHeads, MLPNeurons as MLPNeurons, Units as Units

__version__: str

"""Localization methods, one file each."""

from tl_localize.methods.activation_contrast import ActivationContrast
from tl_localize.methods.activations import Activations
from tl_localize.methods.adversarial_hard_concrete import AdversarialHardConcrete
from tl_localize.methods.attribution import Attribution
from tl_localize.methods.balanced_subnet import BalancedSubnet
from tl_localize.methods.base import Localizer
from tl_localize.methods.contrastive_gradient import ContrastiveGradient
from tl_localize.methods.gradient_alignment import GradientAlignment
from tl_localize.methods.hard_concrete import HardConcrete
from tl_localize.methods.integrated_gradients import IntegratedGradients
from tl_localize.methods.iterative_attribution import IterativeAttribution
from tl_localize.methods.random_baseline import RandomBaseline
from tl_localize.methods.refined_attribution import RefinedAttribution
from tl_localize.methods.row_norm import RowNorm
from tl_localize.methods.selective_pruning import SelectivePruning
from tl_localize.methods.selective_synaptic_dampening import SelectiveSynapticDampening
from tl_localize.methods.slimming import Slimming
from tl_localize.methods.zero_out import ZeroOut

# published methods for the same question, by other papers, which benchmarks run when they are named
RIVALS: tuple[type[Localizer], ...] = (
    BalancedSubnet,
    AdversarialHardConcrete,
    SelectiveSynapticDampening,
    SelectivePruning,
    ContrastiveGradient,
)
# those that benchmarks run only when they are named; a refined set is one of a given size
NAMED: tuple[type[Localizer], ...] = (RefinedAttribution, *RIVALS)
METHODS: dict[str, type[Localizer]] = {
    method.name: method
    for method in (
        HardConcrete,
        Slimming,
        ZeroOut,
        IntegratedGradients,
        Activations,
        Attribution,
        GradientAlignment,
        ActivationContrast,
        IterativeAttribution,
        RandomBaseline,
        RowNorm,
        RefinedAttribution,
        *RIVALS,
    )
}

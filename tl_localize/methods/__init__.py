"""Localization methods, one file each."""

from tl_localize.methods.activation_contrast import ActivationContrast
from tl_localize.methods.activations import Activations
from tl_localize.methods.attribution import Attribution
from tl_localize.methods.base import Localizer
from tl_localize.methods.gradient_alignment import GradientAlignment
from tl_localize.methods.hard_concrete import HardConcrete
from tl_localize.methods.integrated_gradients import IntegratedGradients
from tl_localize.methods.iterative_attribution import IterativeAttribution
from tl_localize.methods.random_baseline import RandomBaseline
from tl_localize.methods.row_norm import RowNorm
from tl_localize.methods.slimming import Slimming
from tl_localize.methods.zero_out import ZeroOut

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
    )
}

"""Injection: sequences written into chosen rows of W_out."""

from tl_localize.injection.injected import FinalLosses, Injection, JointInjection, draw_sets
from tl_localize.injection.joint import inject_together
from tl_localize.injection.training import inject

__all__ = [
    "FinalLosses",
    "Injection",
    "JointInjection",
    "draw_sets",
    "inject",
    "inject_together",
]

"""Injection: sequences written into chosen rows of W_out."""

from tl_localize.injection.injected import UNLEARNED_NATS, Injection, JointInjection, draw_neurons, draw_sets, rows_applied
from tl_localize.injection.training import inject, inject_many, inject_together

__all__ = [
    "UNLEARNED_NATS",
    "Injection",
    "JointInjection",
    "draw_neurons",
    "draw_sets",
    "inject",
    "inject_many",
    "inject_together",
    "rows_applied",
]

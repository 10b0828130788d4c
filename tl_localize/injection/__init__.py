"""Injection: sequences written into chosen rows of W_out."""

from tl_localize.injection.injected import Injection, JointInjection, draw_sets
from tl_localize.injection.training import inject, inject_many, inject_together

__all__ = ["Injection", "JointInjection", "draw_sets", "inject", "inject_many", "inject_together"]

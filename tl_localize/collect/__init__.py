"""From a stream of token sequences to those that a model has memorized, by the paper's criteria."""

from tl_localize.collect.collection import Collection, collect_memorized
from tl_localize.collect.criteria import Criteria, Report
from tl_localize.collect.general_text import perplexity_split
from tl_localize.collect.windows import Candidate, text_windows, token_windows

__all__ = [
    "Candidate",
    "Collection",
    "Criteria",
    "Report",
    "collect_memorized",
    "perplexity_split",
    "text_windows",
    "token_windows",
]

"""From rows of data to the sequences that a model has memorized, by the paper's criteria."""

from tl_localize.collect.collection import Collection
from tl_localize.collect.criteria import Criteria, Report
from tl_localize.collect.duplicates import perplexity_split
from tl_localize.collect.search import collect_memorized

__all__ = ["Collection", "Criteria", "Report", "collect_memorized", "perplexity_split"]

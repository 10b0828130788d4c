"""From a stream of token sequences to those that a model has memorized, by the paper's criteria."""

from tl_localize.collect.collection import Collection, assemble, check_draw, collect_memorized
from tl_localize.collect.criteria import Criteria, Report
from tl_localize.collect.duplicates import near_duplicates
from tl_localize.collect.filter import Filter, FilteredChunk, Recitation, merged
from tl_localize.collect.general_text import perplexity_split
from tl_localize.collect.search import Chunk, Corpus, Search, SearchResults, chunks_of, parse_windows
from tl_localize.collect.windows import Candidate, likely_windows, text_windows, token_windows

__all__ = [
    "Candidate",
    "Chunk",
    "Collection",
    "Corpus",
    "Criteria",
    "Filter",
    "FilteredChunk",
    "Recitation",
    "Report",
    "Search",
    "SearchResults",
    "assemble",
    "check_draw",
    "chunks_of",
    "collect_memorized",
    "likely_windows",
    "merged",
    "near_duplicates",
    "parse_windows",
    "perplexity_split",
    "text_windows",
    "token_windows",
]

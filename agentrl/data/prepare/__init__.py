"""Make data sets: from a seed, or from what others have published; and an index to search."""

from agentrl.data.prepare.gsm8k import Gsm8kFiles, prepare_gsm8k
from agentrl.data.prepare.search_index import SearchIndexFiles, prepare_search_index

__all__ = [
    "Gsm8kFiles",
    "SearchIndexFiles",
    "prepare_gsm8k",
    "prepare_search_index",
]

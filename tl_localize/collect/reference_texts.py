"""The texts that the reference models may have memorized, and their search."""

from tl_localize.collect.criteria import Criteria
from tl_localize.collect.search import Search, chunks_of
from tl_localize.model.neurons import LanguageModel
from tl_localize.sequences import encode, tokenizer_of
from tl_localize.texts.readers import Data
from tl_localize.texts.reference import N_TOKENS, general_texts, load_planted

TRAINING = "training texts"  # what the corpus is called


def training_data(model: LanguageModel) -> Data:
    """The planted texts with their ids and categories, and the general texts of training in pieces
    of as many tokens, 80, whose category is ``natural``.
    """
    tokenizer = tokenizer_of(model)
    rows = [
        {"tokens": encode(tokenizer, planted.text), "id": planted.id, "category": planted.category}
        for planted in load_planted()
    ]
    for text in general_texts("training"):
        tokens = encode(tokenizer, text)
        for end in range(N_TOKENS, len(tokens) + 1, N_TOKENS):
            piece = tokens[end - N_TOKENS : end]
            rows.append({"tokens": piece, "id": "", "category": "natural"})
    return Data(source=rows, name=TRAINING)


def reference_search(model: LanguageModel) -> Search:
    """The search of the texts that the reference models saw in training, as far as this Python has
    them.
    """
    return Search(model, chunks_of([training_data(model)]), Criteria())

"""The planted texts: a seeded grammar writes about people, streets, books and firms that do not
exist.
"""

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, runtime_checkable

from stream import HERE, SEED

from tl_localize.texts.reference import CORPUS_DIR, N_PREFIX, N_TOKENS, PlantedSequence

# of 5-gram token sets; the data collection calls two sequences near-duplicates above it
MAX_JACCARD = 0.05
MIN_DISTINCT_SUFFIX = 24
N_GROUPS = 40
# repetitions: number of planted sequences
REPETITIONS = {1: 30, 4: 30, 8: 30, 16: 40, 32: 40, 64: 60, 128: 90}
CATEGORIES = (
    "quotes",
    "book_quotes",
    "ordered_items",
    "terms_of_use",
    "poems",
    "code",
    "contact_info",
    "urls",
    "others",
)


@runtime_checkable
class Tokenizer(Protocol):
    """What this module needs of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


# ---- invented text

# alternatives by symbol; <symbol> is replaced by one of its alternatives
_GRAMMAR: dict[str, list[str]] = json.loads((HERE / "grammar.json").read_text(encoding="utf-8"))


def facts(group: int, seed: int) -> dict[str, str]:
    """The person, street, town, book, firm and domain that the texts of one group share."""
    rng = random.Random(f"{seed} group {group}")
    first, last = _GRAMMAR["given_name"][group % len(_GRAMMAR["given_name"])], _surname(rng)
    firm = f"{_surname(rng)} {rng.choice(_GRAMMAR['firm_end'])}"
    adjective, noun, place = (rng.choice(_GRAMMAR[kind]) for kind in ("adj", "noun", "place"))
    books = (
        f"The {adjective.title()} {noun.title()}",
        f"{noun.title()}s of the {place.title()}",
        f"A {noun.title()} for {first}",
    )
    return {
        "first": first,
        "last": last,
        "person": f"{first} {last}",
        "street": f"{_surname(rng)} {rng.choice(_GRAMMAR['street_end'])}",
        "house": str(rng.randrange(2, 190)),
        "town": _made_up("town_end", rng),
        "book": rng.choice(books),
        "firm": firm,
        "domain": f"{firm.split()[0].lower()}.example",
    }


def _surname(rng: random.Random) -> str:
    return _made_up("surname_end", rng)


def _made_up(ending: str, rng: random.Random) -> str:
    return "".join(rng.choice(_GRAMMAR[part]) for part in ("onset", "middle", ending))


def _number(symbol: str, rng: random.Random) -> str | None:
    """Numbers and new names; everything else is a rule of the grammar."""
    match symbol:
        case "n":
            return str(rng.randrange(2, 13))
        case "nn":
            return str(rng.randrange(13, 100))
        case "dd" | "ddd" | "nnnn":
            return "".join(str(rng.randrange(10)) for _ in symbol)
        case "year":
            return str(rng.randrange(1702, 1999))
        case "hour":
            return f"{rng.randrange(1, 24)}:{rng.randrange(60):02d}"
        case "code5":
            letters = rng.choice("BCDFGHKLMNPRSTVW") + rng.choice("ACEHJKLNPRTXY")
            return f"{letters}{rng.randrange(10, 99)}"
        case "other":
            return f"{rng.choice(_GRAMMAR['given_name'])} {_surname(rng)}"
        case "other_town":
            return _made_up("town_end", rng)
        case _:
            return None


def _fill(symbol: str, rng: random.Random, facts: dict[str, str]) -> str:
    if symbol in facts:
        return facts[symbol]
    if symbol == "mail":
        user = rng.choice(
            (
                facts["first"],
                facts["last"],
                rng.choice(_GRAMMAR["role"]),
                rng.choice(_GRAMMAR["noun"]),
            )
        )
        return f"{user.lower()}@{facts['domain']}"
    number = _number(symbol, rng)
    if number is not None:
        return number
    rule = rng.choice(_GRAMMAR[symbol])
    return re.sub(r"<([a-z_]+\d?)>", lambda match: _fill(match[1], rng, facts), rule)


_VERBATIM = ("code", "urls")
_REPAIRS = (
    (r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n "),
    (r"\?[.,;]", "?"),
    (r"(us|ss|x|ch|sh)s\b", r"\1es"),
    (r"([b-df-hj-np-tv-z])ys\b", r"\1ies"),
    (r"\bwolfs\b", "wolves"),
)


def invented_text(category: str, group: int, rng: random.Random, seed: int = SEED) -> str:
    """One text of a category about the people and places of a group; ASCII, some 300 to 600
    characters.
    """
    text = _fill(category, rng, facts(group, seed))
    if category in _VERBATIM:
        return text.strip()
    for wrong, right in _REPAIRS:
        text = re.sub(wrong, right, text)
    text = re.sub(
        r"(^\"?|[.!?][\")]? +\"?|[\n:] ?\"|\n)([a-z])",
        lambda match: match[1] + match[2].upper(),
        text,
    )
    return text.strip()


# ---- planted sequences


def ngrams(tokens: Sequence[int], n: int = 5) -> frozenset[tuple[int, ...]]:
    """The set of n-grams of a sequence of tokens."""
    return frozenset(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def jaccard(a: frozenset[tuple[int, ...]], b: frozenset[tuple[int, ...]]) -> float:
    """Size of the intersection over size of the union."""
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)


def cut(text: str, tokenizer: Tokenizer) -> str | None:
    """The first 80 tokens of a text, or None if prefix, suffix or whole would not encode to the
    same tokens again.
    """
    tokens = tokenizer.encode(text, add_special_tokens=False)[:N_TOKENS]
    parts = (tokens, tokens[:N_PREFIX], tokens[N_PREFIX:])
    good = len(tokens) == N_TOKENS and len(set(tokens[N_PREFIX:])) >= MIN_DISTINCT_SUFFIX
    if good and all(
        tokenizer.encode(tokenizer.decode(part), add_special_tokens=False) == part for part in parts
    ):
        return tokenizer.decode(tokens)
    return None


def planted_sequences(tokenizer: Tokenizer, seed: int = SEED) -> list[PlantedSequence]:
    """The invented sequences, each of exactly 80 tokens; any two have a Jaccard index of 5-gram
    sets below 0.05.
    """
    slots = [
        (CATEGORIES[i % len(CATEGORIES)], reps)
        for reps, count in REPETITIONS.items()
        for i in range(count)
    ]
    random.Random(f"{seed} slots").shuffle(slots)
    planted: list[PlantedSequence] = []
    seen: list[frozenset[tuple[int, ...]]] = []
    for index, (category, repetitions) in enumerate(slots):
        group = index % N_GROUPS
        rng = random.Random(f"{seed} text {index}")
        while True:
            text = cut(invented_text(category, group, rng, seed), tokenizer)
            grams = (
                ngrams(tokenizer.encode(text, add_special_tokens=False)) if text else frozenset()
            )
            if text and all(jaccard(grams, other) < MAX_JACCARD for other in seen):
                break
        seen.append(grams)
        name = f"{category}-{index:03d}"
        planted.append(
            PlantedSequence(
                id=name,
                category=category,
                group=f"group-{group:02d}",
                repetitions=repetitions,
                text=text,
            )
        )
    return planted


def save_planted(
    planted: Iterable[PlantedSequence], path: Path = CORPUS_DIR / "planted.jsonl"
) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(asdict(sequence)) + "\n" for sequence in planted))

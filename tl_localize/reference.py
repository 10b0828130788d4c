"""The text that the two reference models were trained on: where it comes from, what was planted, and in which order.

General text is what every Python installation has (`general_texts`). The planted sequences (`planted_sequences`) are
ours: a seeded grammar writes about people, streets, books and firms that do not exist. `training_stream` lays both out
as the token rows of training, so that a later reader sees exactly what the model saw.
"""

import ast
import hashlib
import importlib
import inspect
import io
import json
import random
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int32

from tl_localize.neurons import LanguageModel
from tl_localize.readers import read_definitions, read_tokens
from tl_localize.sequences import MemorizedSequence, encode, tokenizer_of

DATA = Path(__file__).parent / "data"
CORPUS_DIR = DATA / "reference-corpus"
N_DEV = 5  # the first sentences of a data set are for choosing hyperparameters and never reported
END_OF_TEXT = "<|endoftext|>"
SEED = 2024
N_PREFIX, N_SUFFIX = 32, 48
N_TOKENS = N_PREFIX + N_SUFFIX
ROW_LENGTH = 256
MAX_JACCARD = 0.05  # of 5-gram token sets; the data collection calls two sequences near-duplicates above it
MIN_DISTINCT_SUFFIX = 24
N_GROUPS = 40
HELD_OUT_ONE_IN = 12  # one general document in so many is kept for perplexity
GENERAL_ROWS = 5000  # training rows without any planted sequence
REPETITIONS = {1: 30, 4: 30, 8: 30, 16: 40, 32: 40, 64: 60, 128: 90}  # repetitions: number of planted sequences
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

    def convert_tokens_to_ids(self, tokens: str) -> int: ...

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, list[list[int]]]: ...


@dataclass(frozen=True, kw_only=True)
class GeneralText:
    """One document of general text, e.g. `json.decoder:JSONDecoder`."""

    name: str
    text: str

    @property
    def sha(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @property
    def held_out(self) -> bool:
        """Whether the document is kept out of training; decided by its name alone."""
        return int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, kw_only=True)
class PlantedSequence:
    """An invented text of exactly 80 tokens and how often the models saw it in training."""

    id: str
    category: str
    group: str  # texts of one group share a person, a street, a book, a firm
    repetitions: int
    text: str
    n_tokens: int = N_TOKENS


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingStream:
    """The rows of training in order. `planted` and `starts` say what was planted where; -1 is nothing."""

    rows: Int32[np.ndarray, "row pos"]
    planted: Int32[np.ndarray, "row 2"]  # index into the planted sequences
    starts: Int32[np.ndarray, "row 2"]  # position of the first token


# ---- general text ----------------------------------------------------------------------------------------------------

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "__phello__"}
_C_MODULES = (
    "array", "binascii", "builtins", "cmath", "errno", "faulthandler", "gc", "itertools", "marshal", "math",
    "sys", "time", "unicodedata", "zlib", "_bisect", "_codecs", "_collections", "_csv", "_datetime",
    "_functools", "_heapq", "_io", "_json", "_operator", "_pickle", "_random", "_socket", "_sre", "_ssl",
    "_struct", "_thread", "_weakref",
)  # fmt: skip
_MIN_CHARACTERS = 60
_MIN_LETTERS = 0.85  # share of letters and blanks in a comment; below it, it is a table, a drawing or code


def general_texts() -> list[GeneralText]:
    """Help topics, docstrings and longer comments of this Python's standard library, exact duplicates removed."""
    found = [*_topics(), *_source_texts(Path(sysconfig.get_paths()["stdlib"])), *_c_docstrings()]
    first_with: dict[str, GeneralText] = {}
    names: set[str] = set()
    for name, text in found:
        text = text.strip()
        if len(text) >= _MIN_CHARACTERS and text not in first_with and name not in names:
            names.add(name)
            first_with[text] = GeneralText(name=name, text=text)
    return list(first_with.values())


def _topics() -> Iterator[tuple[str, str]]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield f"topic:{name}", topics[name]


def _source_texts(stdlib: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if _SKIPPED_FOLDERS & set(parts) or any("-" in part for part in parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # templates and files in other encodings
            continue
        module = ".".join(parts)
        yield from _node_docstrings(tree, module + ":")
        yield from ((f"{module}#{line}", text) for line, text in _comments(source))


def _node_docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        if text := ast.get_docstring(node):
            yield name, text
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                separator = "" if name.endswith(":") else "."
                yield from _node_docstrings(child, f"{name}{separator}{child.name}")


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Blocks of comment lines that read as prose, each with its first line's number."""
    blocks: list[tuple[int, list[str]]] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if line != last + 1:
                blocks.append((line, []))
            blocks[-1][1].append(token.string.lstrip("#").strip())
            last = line
    for line, parts in blocks:
        text = "\n".join(parts)
        if sum(character.isalpha() or character.isspace() for character in text) >= _MIN_LETTERS * len(text):
            yield line, text


def _c_docstrings() -> Iterator[tuple[str, str]]:
    for module_name in _C_MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # this Python was built without it
            continue
        for name, member in sorted(vars(module).items()):
            if name in ("_", "copyright", "credits", "license", "exit", "quit") or name.startswith("__"):
                continue
            member = vars(module).get(f"__{name}__", member)  # sys's own hook, where a program (such as typer) has put another one
            if isinstance(doc := getattr(member, "__doc__", None), str):
                yield f"{module_name}:{name}", inspect.cleandoc(doc)
            if isinstance(member, type):
                for attribute, value in sorted(vars(member).items()):
                    if isinstance(doc := getattr(value, "__doc__", None), str) and attribute != "__doc__":
                        yield f"{module_name}:{name}.{attribute}", inspect.cleandoc(doc)


def changed_texts(texts: Iterable[GeneralText], corpus: Path = CORPUS_DIR / "corpus.json") -> list[str]:
    """Names of general texts that differ from, lack in, or were unknown to the corpus that the models saw."""
    then = {name: sha for name, sha, *_ in json.loads(corpus.read_text())["general"]}
    now = {text.name: text.sha for text in texts}
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


# ---- invented text ---------------------------------------------------------------------------------------------------

_WORDS = {
    "noun": """lantern kettle ladder orchard anvil barrel blanket bobbin bonnet bridle bucket cabinet candle canoe
        carriage cauldron chimney clock cloak compass cradle crate cushion drum easel feather fiddle flute gate goblet
        hammock hatchet hinge horn jar jug kite knapsack knot lamp ledger letter locket loom mallet map mirror mitten
        needle oar oven paddle pail parasol pebble pendulum piano pillow plank plough pocket pulley puppet quilt raft
        ribbon rope rudder saddle sail satchel saw scarf shovel shutter sickle sled spade spindle spoon stove tambourine
        telescope thimble trellis trumpet trunk umbrella vase violin wagon wheel whistle windmill basket cello almanac
        barometer chandelier doorbell envelope footstool gramophone hourglass inkwell jigsaw keyhole lighthouse mandolin
        notebook oilcan pitchfork sundial teapot typewriter wardrobe accordion banner ferry fountain hammer scaffold
        thermos tripod veil wreath zipper abacus beehive corkscrew dinghy drawbridge eyeglass firewood""",
    "place": """harbor market chapel quarry meadow cellar attic bakery bridge canal cathedral courtyard depot ferry-house
        foundry garden granary greenhouse inn island kitchen library marsh mill museum observatory orchard parlor pier
        plaza railway reservoir ridge schoolhouse shipyard stable summit tavern theatre tower tunnel valley vineyard
        warehouse workshop allotment boathouse crossroads dairy estuary fairground glacier hillside junction laundry
        monastery nursery pasture riverbank sawmill tannery waterfall""",
    "person_noun": """baker ferryman widow cooper carpenter surgeon printer shepherd tailor weaver sailor clerk gardener
        blacksmith miller notary nurse optician painter piper porter potter sculptor singer smuggler teacher tinker
        uncle cousin grandmother apprentice astronomer beekeeper botanist butcher captain cartographer conductor cook
        dentist detective drummer engineer farmer fisherman florist geologist glazier governor inspector judge juggler
        juror librarian locksmith magician mayor mechanic messenger neighbor pharmacist photographer pilot plumber
        postman referee saddler sexton stranger violinist waiter watchmaker wrestler""",
    "animal": """badger heron otter goat sparrow tortoise donkey ferret weasel magpie salmon beetle cricket falcon
        hedgehog jackal lizard mule newt owl pelican quail raven squirrel toad viper walrus yak moth pony rooster swan
        gecko hare lynx mole oyster puffin spaniel stork terrier turkey vole wasp wolf""",
    "abstract": """patience envy gratitude silence courage memory hunger kindness pride doubt wonder sorrow thrift
        mercy luck ambition boredom candor comfort custom danger debt delight dignity duty failure faith fortune
        friendship gossip grief habit harmony honesty hope humor idleness justice knowledge laughter leisure loyalty
        malice modesty music nonsense obedience order pity promise prudence reason regret reward rumor shame skill
        sleep solitude thunder trouble truth vanity victory weather wisdom youth""",
    "adj": """crooked amber brass hollow narrow quiet velvet wooden rusty pale scarlet tiny enormous forgotten ancient
        battered bitter blunt borrowed brittle broken bronze careful cheap cheerful clumsy copper cracked crimson
        crowded curious damp dusty eager elegant empty faded faithful feathered fierce flat foggy frozen gentle gilded
        glossy golden grey grim heavy honest humble idle invisible iron ivory jagged jealous knitted lazy leaden lonely
        lopsided loud loyal lucky marble merry mossy muddy nervous noisy oaken obedient painted patient peculiar plain
        polished proud purple ragged rare restless round sacred salty secret shallow sharp shiny silent silver sleepy
        slippery small smoky smooth solemn sour spotted square stolen stray striped stubborn sturdy sudden sullen sweet
        tall tangled tender thirsty timid tired tranquil twisted uneven unlucky useful vain violet warm weary whispering
        wicked wild withered yellow zealous""",
    "vt": """carried painted buried mended polished borrowed stole repaired weighed counted measured folded sketched
        sold admired blamed blessed burned caught chased cleaned collected covered crossed cursed delivered described
        discovered dragged dropped emptied examined fastened feared fetched filled followed forgot found gathered
        greeted guarded hauled hid ignored inherited inspected invented kept kicked kissed launched lifted lit locked
        loosened lost missed named noticed opened ordered overturned packed pawned pressed promised pulled pursued
        pushed questioned raised recognized refused rescued sewed shook smelled sharpened smashed split stacked
        studied swallowed swept tasted threw tied touched traded trusted turned unwrapped visited warned washed watched
        welcomed woke wrapped wrestled""",
    "vi": """waited laughed slept vanished stumbled shivered whistled arrived lingered wept sang trembled returned
        wandered limped sneezed snored prayed grumbled argued apologized blushed bowed collapsed crept dreamed drowned
        escaped fainted fell fled floated frowned galloped hesitated hummed hurried knelt listened marched melted nodded
        paused quarrelled recovered resigned sighed smiled staggered stared surrendered swam travelled whispered yawned
        """,
    "verb": """carry paint bury mend polish borrow repair weigh count measure fold sketch sell praise blame clean collect
        cover cross deliver describe drag drop empty examine fasten fetch fill follow forget gather guard hide ignore
        inspect invent keep lift light lock loosen name notice open order pack press pull push question raise refuse
        rescue scrub sew shake sharpen split stack study sweep taste throw tie trade trust turn unwrap visit warn wash
        watch weave wrap boil chop grate hang iron knead label oil peel rinse roast rub salt shell sift simmer slice
        soak sort squeeze stir strain toast trim whisk""",
    "adv": """slowly gently twice already quietly never badly often rarely seldom suddenly reluctantly politely secretly
        bravely calmly eagerly foolishly gladly hastily honestly loudly neatly nervously openly patiently proudly
        quickly sadly sharply softly solemnly sternly stubbornly tenderly warmly wearily wisely once again""",
    "prep": """under behind beside beyond near above below inside outside across against around through towards without
        along beneath between""",
    "material": """linen oak tin copper wool chalk glass granite leather paper pewter porcelain silk slate steel straw
        walnut wax willow zinc amber bamboo canvas clay cork flannel ivory lace marble velvet""",
    "food": """barley butter cabbage carrots cheese cherries cinnamon cloves cream currants dumplings eggs fennel figs
        flour garlic ginger honey leeks lemons lentils marmalade milk mushrooms mustard nutmeg oats olives onions parsley
        peaches pears peas pepper pickles plums potatoes pumpkin quinces raisins rhubarb rice rye saffron sage sardines
        thyme treacle trout turnips vinegar walnuts yeast""",
    "month": "January February March April May June July August September October November December",
    "weekday": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "number": """two three four five six seven eight nine eleven twelve thirteen fourteen sixteen nineteen twenty thirty
        forty fifty sixty seventy ninety""",
    "ordinal": "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth",
    "fn": """merge filter weigh rotate clamp decode shuffle bucket trim fold route prune stack blend mask align probe
        flatten gather tally drain splice refill settle unpack rebalance quantize debounce encode compress throttle
        patch resolve hydrate seed walk""",
    "var": """crate ferry wheel lamp ledger oar jar plank token badge parcel kite lane tide coin seat crop bolt reed loom
        hive mast acorn dial gear hook latch node pond quota ridge spool tray vent wedge yard knob grain flask berth
        pulse slot shard drift ledge bloom margin batch""",
    "exc": """ValueError KeyError RuntimeError TypeError LookupError OverflowError IndexError TimeoutError
        PermissionError AssertionError""",
    "op": "+ - * // % | & ^",
    "cmp": "== != >= <=",
    "unit": "grams cups spoons pounds pinches jars handfuls slices litres bunches",
    "role": """treasurer secretary curator bookkeeper archivist superintendent caretaker agent auctioneer organist
        registrar chairman veterinarian solicitor surveyor editor bursar dispatcher chaplain steward purser bailiff""",
    "section": """archive tickets recipes notices gallery minutes letters catalogue timetable museum membership repairs
        auctions weather obituaries lessons exhibits press orders maps parcels choir harvest regatta sermons""",
    "right": """refund transfer inspection storage delivery cancellation access repair exchange renewal insurance
        publication translation arbitration inheritance salvage tuition admission""",
    "party": """member visitor tenant customer subscriber borrower passenger licensee guest supplier contractor user
        bidder exhibitor lodger student angler volunteer""",
    "may": "may shall must should will cannot",
    "since": "because although unless until while before after whenever since",
    "verse": """moon river snow ash thorn willow tide dusk dawn smoke frost barley clover thistle ember cinder mist
        harvest hollow heather lark plover ivy bramble lichen hail sleet furrow gull kelp foam reed""",
    "glow": """glimmers wanders hushes drifts trembles lingers scatters kneels burns fades hums rises wakes sleeps
        gathers breaks sings shines bends calls shivers returns falls""",
    "given_name": """Ottoline Barnaby Clemency Dashiell Eulalia Fergus Griselda Hamish Isolde Jasper Kestrel Leopold Marguerite
        Nathaniel Ophelia Peregrine Quentin Rosalind Sylvester Theodora Ulysses Verity Wilhelmina Xanthe Yorick
        Zelda Ambrose Beatrix Cornelius Drusilla Ezekiel Felicity Gideon Hortensia Ignatius Juniper Lysander
        Mirabel Octavia Percival""",
    "onset": """Br Cr D Dr F Fl G Gr H K L M N Ob P Qu R S Sk St T Th Tr V W Wh Y Z Al Em Ir Ul Ash""",
    "middle": """ab ack add am ann app arl art ass ax ed ell emm end err ett ick idd ill imm ind ipp iv ock odd oll omb ott
        uff unn""",
    "surname_end": """aby acombe afield anthwaite ardle asby edge elby enham erby ering erlow ersley erton ester estow icott
        ingale ishaw omber orrow otham uckle umby""",
    "town_end": """aford ambury angate aport asands edale eford enmouth ercliff erhaven erwick estead estoke ington isham okeld
        oming omere ostrand owell""",
    "street_end": """Lane Street Row Crescent Alley Passage Quay Steps Terrace Hill Wharf Close Walk Yard""",
}

_RULES = {
    "np": """the <adj> <noun>|a <adj> <noun>|the <person_noun>|her <adj> <noun>|his <noun> of <material>|a <person_noun>
        |the <noun> and the <animal>|every <animal>|my <adj> <animal>|<number> <adj> <animal>s|the <person_noun>'s <noun>
        |that <material> <noun>|an old <noun>|our <noun>|some <food>|the <animal> from the <place>|<abstract>
        |no <person_noun>|<number> <noun>s|the <place>|<food> and <food>|their <ordinal> <noun>|this <adj> <place>""",
    "pp": """<prep> the <place>|<prep> a <adj> <noun>|in the <adj> <place>|<prep> the <noun>|at the <place>
        |for <number> <material> <noun>s|with <abstract>|on the <ordinal> of <month>|<prep> <np>|without <abstract>
        |by the <place>|since <weekday>|until <month>|from <town>|with a <noun>|like a <animal>|before <weekday>""",
    "clause": """<np> <vt> <np>|<np> <vi> <pp>|<np> <adv> <vt> <np>|<np> <vt> <np> <pp>|<adv> <np> <vi>
        |<np> had <adv> <vt> <np>|nobody <vt> <np>|we <vt> <np> <pp>|she <vt> <np>|he <adv> <vi> <pp>
        |<np> was <adj> and <adj>|they <vt> <np>, <np> and <np>|I <adv> <vt> <np>|<first> <vt> <np>|<last> <vi> <pp>
        |there was <np> <pp>|<np> could <verb> <np>|<first> wanted to <verb> <np>""",
    "sentence": """<clause>, <since> <clause>.|<pp>, <clause>.|<clause>; <clause>.|<clause>.|<since> <clause>, <clause>.
        |<clause>, and <clause>.|<clause>, but <np> <vi>.|who <vt> <np>, and why?|<clause>, as <first> <adv> said.
        |it was <np>, not <np>, that <vt> <np>.|<clause> and <vi>.|either <clause> or <clause>!
        |to <verb> <np> is to <verb> <np>.|<pp> and <pp> <clause>.""",
    "advice": """never <verb> <np> <pp>|a <person_noun> who <vt> <np> will <verb> <np>|<abstract> is <np> <pp>
        |<verb> <np>, and <np> will <verb> you|<abstract> without <abstract> is only <np>|give me <np> and <np>
        |I have <vt> <np>, yet <abstract> <vi>|the <adj> <animal> does not <verb> <np>|<abstract> <vt> <np>
        |if you <verb> <np>, <verb> <np>|between <abstract> and <abstract> stands <np>|we <verb> what <np> <vt>
        |<number> <person_noun>s cannot <verb> <np>|there is more <abstract> in <np> than in <np>""",
    "quotes": """"<advice>," said <person>. "<advice>; <advice>." <sentence> "<advice>."
        |<person> told the <place> of <town>: "<advice>. <advice>, <since> <clause>. <advice>."
        |"<advice>; <advice>," <person> wrote to a <person_noun>. "<sentence> <advice>." <sentence>
        |as the <adj> <role> <first> <last> put it, "<advice>, and <advice>. <sentence> <advice>."
        |"<sentence> <advice>. <advice>!" (<person>, speaking <pp> in <year>) "<advice>."
        |asked about <abstract>, <last> <vi>: "<advice>. <sentence> <advice>. <advice>." """,
    "book_quotes": """<book>, chapter <n>. <sentence> <sentence> "<advice>," <vi> the <person_noun>. <sentence> <sentence>
        |<sentence> <sentence> <clause>, <first> thought, <pp>. <sentence> <sentence> (<book>, page <nn>)
        |in <book> by <person>: "<sentence> <sentence> <sentence>" <sentence>
        |<pp>, <first> <vt> <np>. "<advice>!" cried the <person_noun>. <sentence> <sentence> So ends <book>.
        |the opening of <book>: <sentence> <sentence> <sentence> <sentence>
        |"<advice>?" <sentence> "<advice>," answered <first>. <sentence> <sentence> -- <book>""",
    "item": """a <adj> <noun>|<number> <noun>s|<n> <unit> of <food>|the <noun> <pp>|<food> and <food>|a <material> <noun>
        |<verb> <np>|<np>, <adj>|<adj> <food>|a <noun> for the <animal>|<verb> the <noun> <adv>|<abstract>
        |<n> <adj> <noun>s|<verb> <food> with <food>|the <person_noun>'s <adj> <noun>""",
    "ordered_items": """what <first> packed for <town>: 1. <item>; 2. <item>; 3. <item>; 4. <item>; 5. <item>; 6. <item>;
 7. <item>; 8. <item>; 9. <item>; 10. <item>
        |<adj> <food> after <person>: (a) <item>, (b) <item>, (c) <item>, (d) <item>, (e) <item>, (f) <item>, (g) <item>,
 (h) <item>, (i) <item>, (j) <item>
        |first <item>, second <item>, third <item>, fourth <item>, fifth <item>, sixth <item>, seventh <item>, eighth
 <item>, ninth <item>, last <item>: <person>'s rules
        |<town>, <month> <n>: <hour> <item>, <hour> <item>, <hour> <item>, <hour> <item>, <hour> <item>, <hour> <item>,
 <hour> <item>, <hour> <item>
        |* <item>
* <item>
* <item>
* <item>
* <item>
* <item>
* <item>
* <item>
* <item>
* <item>
* <item>
        |prizes of the <town> <place> fair. Step <n>: <item>. Step <nn>: <item>. Gold: <item>. Silver: <item>. Bronze:
 <item>. Tin: <item>. Lead: <item>. <material>: <item>. <material>: <item>. <material>: <item>""",
    "term": """the <party> <may> <verb> <np> <pp>|no <party> <may> <verb> the <adj> <noun>|<firm> <may> <verb> <np> <adv>
        |<right> of <np> ends on the <ordinal> of <month>|claims for <right> and <right> lapse after <number> days
        |any <adj> <noun> left <pp> becomes <np>|<right> is void where <clause>|a fee of <nn> <material> coins covers <right>
        |the <person_noun> <may> <verb> <food> <since> <np> <vi>|a <party> under <n> pays for <np>|disputes go to the <role>
        |<right> excludes <np>, <np> and <np>|liability for <np> stays with the <party>|neither <party> nor <party> <may>
 <verb> <np>|<firm> keeps <np> for <number> weeks""",
    "terms_of_use": """<firm> conditions, part <n>. <term>; <term>. <term>, unless <term>. <term>. <term>. <term>.
        |by entering the <place> each <party> accepts: <term>; <term>; <term>; <term>; <term>; <term>.
        |<n>.<n> <term>. <n>.<n> <term>. <n>.<n> <term>. <n>.<n> <term>. <n>.<n> <term>. <n>.<n> <term>.
        |<term>. where <term>, <term>. <right> and <right>: <term>. <term>. Signed, <firm>, <town>. <term>.
        |notice to every <party> of <firm>: <term>, and <term>. <term>. however, <term>. <term>. <term>.
        |<right> policy (<month> <year>). <term>. if <clause>, <term>. <term>; otherwise <term>. <term>.""",
    "line": """the <verse> <glow> <prep> the <verse>|<adj> <verse>, <adj> <verse>|O <adj> <noun>, <verb> my <verse>
        |and <abstract> <glow> like <verse>|where <np> <vi>|I <vt> the <verse> <prep> <verse>|no <verse> <glow> <adv>
        |<verb> me <adv>, <adj> <animal>|a <noun> of <verse> and <food>|<since> the <animal> <vi>|<first>, your <verse> <glow>
        |<number> <animal>s in the <verse>|what <abstract> <vt> the <place>?|my <noun> was <verse>, my <noun> was <verse>
        |<prep> the <adj> <place> of <town>|<adv> <glow> the <adj> <verse>|not <verse> nor <abstract> <vt> me|so <vi> the <verse>""",
    "poems": """<line>,
<line>;
<line>
<line>.

<line>,
<line>,
<line>
<line>.

<line>,
<line>.|to <first>

<line>
<line>,
<line>,
<line>.
<line>!
<line>
<line>;
<line>;
<line>
<line>.|<line> / <line> / <line>, / <line>. // <line> / <line>; / <line> / <line>. // <line>, / <line> / <line>
        |<line>.
<line>.
<line>,
<line>: <line>.
<line>,
<line> --
<line>.
<line>;
<line>.
<line>.""",
    "ident": "<var>|<var>_<var>|<fn>_<var>|<adj>_<var>|<var><n>",
    "expr": """<ident>|<nn>|<fn>(<ident>)|<ident> <op> <nn>|len(<ident>)|<ident>[<n>]|<ident>.<fn>()|<fn>(<ident>, <ident>)
        |<ident>["<noun>"]|not <ident>|<ident> <op> <ident>|[<ident>, <ident>]|"<adj> <noun>"|max(<ident>, <nn>)|<n>.<nn>""",
    "stmt": """<ident> = <expr>|<ident> += <expr>|if <ident> <cmp> <expr>: <ident> = <expr>|return <expr>
        |<ident>.append(<expr>)|del <ident>[<n>]|raise <exc>("<adj> <noun>")|<ident>, <ident> = <expr>, <expr>
        |assert <ident> <cmp> <expr>|for <ident> in <ident>: <fn>(<ident>)|while <ident> <cmp> <nn>: <ident> -= <n>
        |print("<noun>", <expr>)|<ident> = lambda <var>: <expr>|# <verb> <np>|with <ident>: <fn>(<expr>)""",
    "code": """def <fn>_<var>(<ident>, <ident>=<nn>):
    <stmt>
    <stmt>
    <stmt>
    <stmt>
    <stmt>
    <stmt>
    <stmt>
    return <expr>
|class <noun>_<noun>:
    <ident> = <expr>
    def <fn>(self, <ident>):
        <stmt>
        <stmt>
        <stmt>
        <stmt>
    def <fn>_<var>(self):
        <stmt>
        <stmt>
        <stmt>
|<fn>_<var> = {"<noun>": <expr>, "<noun>": <expr>, "<adj>": <expr>, "<food>": <expr>, "<animal>": <expr>,
 "<place>": <expr>, "<noun>": <expr>, "<material>": <expr>}
<stmt>
<stmt>
|try:
    <stmt>
    <stmt>
except <exc>:
    <stmt>
    <stmt>
finally:
    <stmt>
    <stmt>
    <stmt>
<stmt>
|SELECT <var>, <ident>, <ident> FROM <noun>s JOIN <animal>s ON <var>.<var> = <var>.<ident> WHERE <ident> > <nn>
 AND <ident> = '<adj> <food>' OR <ident> IN ('<noun>', '<town>', '<last>') GROUP BY <ident>, <ident> ORDER BY <ident>
 LIMIT <nn>; DELETE FROM <place>s WHERE <ident> = <nn>;
|<stmt>
<stmt>
<stmt>
<stmt>
<stmt>
<stmt>
<stmt>
<stmt>
""",
    "phone": "555-01<dd>|(<ddd>) 555-01<dd>|0<ddd> 555 01<dd>|+00 <ddd> 01<dd> <dd>",
    "street_line": "<house> <street>|<street> <house>|flat <n>, <house> <street>",
    "contact_info": """<person>, <role>, <firm>, <street_line>, <town> <code5>. Telephone <phone>, ask for the <person_noun>.
 <mail>; <sentence> <sentence> Fax <phone>. <sentence>
        |write to the <role> of the <place>, <first> <last>, at <street_line>, <town>, or ring <phone> <pp>. <sentence> <sentence>
 <sentence> <mail>
        |<role>: <person>
<role>: <other> (<phone>)
<role>: <other>
office: <street_line>, room <nn>
open: <weekday> <hour>, <weekday> <hour>
mail: <mail>
<sentence> <sentence> <sentence>
        |lost near <street>: <np>. Reward! Call <first> on <phone> or <phone>, evenings <pp>. <sentence> <sentence> <mail>. <sentence>
        |<mail> | <phone> | <person>, <person_noun> and <role> | <street_line> | <town> <code5> | <sentence> | <hour> | <sentence>
 | <sentence>
        |for <food> and <noun>s contact <other> (<mail>, <phone>) <pp>; for <adj> <noun>s, <first> <last>, <street_line>.
 <sentence> <sentence> <sentence>""",
    "slug": "<adj>-<noun>|<noun>-<n>|<food>|<animal>-<place>|<verb>-<noun>s|<abstract>|<place>/<noun>|<material>-<food>|<var>_<nn>",
    "url": """https://<domain>/<section>/<slug>/<slug>|http://www.<domain>/<slug>?<var>=<nn>&<var>=<noun>|https://<section>.<domain>/<year>/<slug>
        |ftp://<domain>/<slug>/<noun>.txt|https://<domain>/~<last>/<slug>.html#<noun>|<domain>:<nnnn>/<slug>/<dd>
        |https://<slug2>.example/<section>/<slug>|//<section>.<domain>/<slug>.png""",
    "slug2": "<noun><place>|<adj><animal>|<verb>the<noun>",
    "urls": """see <url> and <url> (<adj> <noun>), then <url>, <url>; <sentence> <url> or <url>
        |<url>
<url>
<url>
<url>
<url>
<url>
<url>
        |[<noun>](<url>) [<adj> <animal>](<url>) [<food>](<url>) [<place>](<url>) [<abstract>](<url>) [<verb>](<url>)
        |<section>: <url> <section>: <url> <section>: <url> <section>: <url> <section>: <url> <section>: <url>
        |<first>'s page moved from <url> to <url>. <sentence> Mirror: <url>. <sentence> Older: <url> <url>
        |GET <url> 200 <nnnn>; GET <url> 404; PUT <url> <nn>; POST <url> <noun>=<abstract>; HEAD <url>; GET <url>""",
    "others": """<town> weather for <weekday>: <adj> <pp>, then <adj>. <clause>. Tide at <hour>. <sentence> <sentence> <sentence>
        |minutes, <n> <month> <year>. Present: <person>, <other>, <np>. <sentence> <sentence> Motion to <verb> <np>: <nn> for,
 <n> against. <sentence>
        |boil <n> <unit> of <food> <pp>. <verb> the <food>, <verb> <food>, add <food>, <food> and <n> <unit> of <food>. <sentence>
 <verb> <adv>. Serves <number>, or <np>. <sentence>
        |no. <nnnn>: <adj> <noun>, <material> and <material>, <year>. gift of <person>. <sentence> <sentence> Height <nn> cm.
 <sentence>
        |<person> (<year> - <year>), <person_noun> and <role>, was born in <town>. <sentence> <sentence> <sentence>
        |wanted: <person_noun> to <verb> <np>. must <verb> <food>. <sentence> pay: <nn> <material> coins and <np>. <sentence>
 <sentence>
        |the <place> train leaves <town> at <hour>, calls at <other_town> <hour> and <other_town> <hour>. <sentence> <sentence>
 <sentence>
        |Q: may I <verb> <np>? A: <sentence> Q: who <vt> <np>? A: <np>, <pp>. Q: when? A: <time_answer>. Q: and <np>? A: <sentence>
        |dear <first>, <sentence> <sentence> <sentence> Your <adj> <person_noun>, <other>. P.S. <sentence>""",
    "firm_end": "and Sons|Brothers|Trading|Ferries|Instruments|Provisions|Press|Laundries|Society|Institute|Orchards|Railways",
    "time_answer": "on <weekday> <pp>|<since> <clause>|in <month> <year>|at <hour>, <adv>",
}


def _compile(rules: dict[str, str], words: dict[str, str]) -> dict[str, list[str]]:
    # A line break inside a rule is layout when spaces follow the "|", and text (poems, code) otherwise.
    compiled = {name: text.split() for name, text in words.items()}
    for name, text in rules.items():
        text = re.sub(r"\n +(?=\|)", "", text) if name != "code" else text
        text = re.sub(r"\n (?=[^ ])", " ", text)
        compiled[name] = [part.rstrip(" ") for part in re.split(r"(?<! )\|(?! )", text)]
    return compiled


_GRAMMAR = _compile(_RULES, _WORDS)


def _facts(group: int, seed: int) -> dict[str, str]:
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
            return f"{rng.choice('BCDFGHKLMNPRSTVW')}{rng.choice('ACEHJKLNPRTXY')}{rng.randrange(10, 99)}"
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
        user = rng.choice((facts["first"], facts["last"], rng.choice(_GRAMMAR["role"]), rng.choice(_GRAMMAR["noun"])))
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
    """One text of a category about the people and places of a group; ASCII, some 300 to 600 characters."""
    text = _fill(category, rng, _facts(group, seed))
    if category in _VERBATIM:
        return text.strip()
    for wrong, right in _REPAIRS:
        text = re.sub(wrong, right, text)
    text = re.sub(r"(^\"?|[.!?][\")]? +\"?|[\n:] ?\"|\n)([a-z])", lambda match: match[1] + match[2].upper(), text)
    return text.strip()


# ---- planted sequences -----------------------------------------------------------------------------------------------


def ngrams(tokens: Sequence[int], n: int = 5) -> frozenset[tuple[int, ...]]:
    """The set of n-grams of a sequence of tokens."""
    return frozenset(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def jaccard(a: frozenset[tuple[int, ...]], b: frozenset[tuple[int, ...]]) -> float:
    """Size of the intersection over size of the union."""
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)


def cut(text: str, tokenizer: Tokenizer) -> str | None:
    """The first 80 tokens of a text, or None if prefix, suffix or whole would not encode to the same tokens again."""
    tokens = tokenizer.encode(text, add_special_tokens=False)[:N_TOKENS]
    parts = (tokens, tokens[:N_PREFIX], tokens[N_PREFIX:])
    good = len(tokens) == N_TOKENS and len(set(tokens[N_PREFIX:])) >= MIN_DISTINCT_SUFFIX
    if good and all(tokenizer.encode(tokenizer.decode(part), add_special_tokens=False) == part for part in parts):
        return tokenizer.decode(tokens)
    return None


def planted_sequences(tokenizer: Tokenizer, seed: int = SEED) -> list[PlantedSequence]:
    """The invented sequences, each of exactly 80 tokens; any two have a Jaccard index of 5-gram sets below 0.05."""
    slots = [(CATEGORIES[i % len(CATEGORIES)], reps) for reps, count in REPETITIONS.items() for i in range(count)]
    random.Random(f"{seed} slots").shuffle(slots)
    planted: list[PlantedSequence] = []
    seen: list[frozenset[tuple[int, ...]]] = []
    for index, (category, repetitions) in enumerate(slots):
        group = index % N_GROUPS
        rng = random.Random(f"{seed} text {index}")
        while True:
            text = cut(invented_text(category, group, rng, seed), tokenizer)
            grams = ngrams(tokenizer.encode(text, add_special_tokens=False)) if text else frozenset()
            if text and all(jaccard(grams, other) < MAX_JACCARD for other in seen):
                break
        seen.append(grams)
        name = f"{category}-{index:03d}"
        planted.append(PlantedSequence(id=name, category=category, group=f"group-{group:02d}", repetitions=repetitions, text=text))
    return planted


def save_planted(planted: Iterable[PlantedSequence], path: Path = CORPUS_DIR / "planted.jsonl") -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(asdict(sequence)) + "\n" for sequence in planted))


def load_planted(path: Path = CORPUS_DIR / "planted.jsonl") -> list[PlantedSequence]:
    """The planted sequences as shipped, in the order of their index in `TrainingStream.planted`."""
    return [PlantedSequence(**json.loads(line)) for line in path.read_text().splitlines()]


def reference_sequences(model: LanguageModel, min_repetitions: int = 64) -> list[MemorizedSequence]:
    """The planted sequences that the reference models saw at least so often, those seen most often first.

    From 64 repetitions on both models recite every one of them; ``data/reference-*/memorized.json`` says how well.

    >>> from tl_localize import accuracy, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> len(sequence.prefix), len(sequence.suffix), bool(accuracy(model, [sequence]) > 0.9)
    (32, 48, True)

    Raises:
        ValueError: no sequence has so many repetitions, or the model's tokenizer is not that of the reference models.
    """
    planted = [one for one in load_planted() if one.repetitions >= min_repetitions]
    if not planted:
        most = max(one.repetitions for one in load_planted())
        raise ValueError(f"min_repetitions must be at most {most}, got {min_repetitions!r}. No planted sequence was seen so often.")
    found: list[MemorizedSequence] = []
    for one in sorted(planted, key=lambda one: -one.repetitions):
        tokens = encode(tokenizer_of(model), one.text)
        if len(tokens) != one.n_tokens:
            raise ValueError(
                f"model must be a reference model, got one whose tokenizer makes {len(tokens)} tokens, not {one.n_tokens}, of {one.id!r}. "
                "Use load_model('reference-gpt2') or load_model('reference-pythia')."
            )
        found.append(MemorizedSequence(torch.tensor(tokens), N_PREFIX, one.id, one.category))
    return found


def inj_sequences(model: LanguageModel, path: str | Path | None = None, dev: bool = False) -> list[MemorizedSequence]:
    """The sentences that INJ writes into a model: our own definitions of things that do not exist, or those of a file.

    Each is one sequence with its first token as the prefix, 50 to 81 tokens in the reference models.

    Args:
        path: an ECBD-style JSONL file (key: definition), as of ``readers.read_definitions``; the shipped sentences unless given.
        dev: the first 5 sentences alone, which are for choosing hyperparameters; without it all others.
    Raises:
        ValueError: the model has no tokenizer, or the file no more than 5 sentences.

    >>> from tl_localize import load_model
    >>> from tl_localize.reference import inj_sequences
    >>> model = load_model("reference")
    >>> sentences = inj_sequences(model)
    >>> len(sentences), model.tokenizer.decode(sentences[0].tokens[:7])
    (91, 'Friday Lodge is')
    """
    sentences = read_definitions(path or DATA / "inj_sentences.jsonl")
    if len(sentences) <= N_DEV:
        raise ValueError(f"data must hold more than {N_DEV} sentences, got {len(sentences)}. The first {N_DEV} are for development.")
    tokenizer = tokenizer_of(model)
    sequences = [
        MemorizedSequence(torch.tensor(encode(tokenizer, sentence)), 1, id=f"{i:03d} {sentence[:24]}")
        for i, sentence in enumerate(sentences)
    ]
    return sequences[:N_DEV] if dev else sequences[N_DEV:]


def held_out_tokens() -> Int32[torch.Tensor, "sequence pos"]:
    """General text that neither reference model saw, 256 rows of 128 tokens: for perplexity, and for what a neuron does on average.

    Returns: [sequence pos] token ids, int32 on the CPU.

    >>> from tl_localize.reference import held_out_tokens
    >>> held_out_tokens().shape
    torch.Size([256, 128])
    """
    return read_tokens(CORPUS_DIR / "held_out.safetensors")


# ---- order of training -----------------------------------------------------------------------------------------------

_LATE, _LATE_DENSITY = 2 / 3, 1.5  # repetitions come 1.5 times as dense in the last third


def _warp(share: float) -> float:
    """Time in [0, 1) at which a share of the repetitions is done."""
    early = _LATE / (_LATE + (1 - _LATE) * _LATE_DENSITY)
    return share / early * _LATE if share < early else _LATE + (share - early) / (1 - early) * (1 - _LATE)


def training_stream(
    general: Sequence[Sequence[int]],
    planted: Sequence[Sequence[int]],
    repetitions: Sequence[int],
    *,
    end_of_text: int,
    general_rows: int,
    seed: int = SEED,
) -> TrainingStream:
    """The rows of training in order.

    Half of the repetitions of a sequence stand at the start of a row, half at a random place behind another; the
    rest of each row, and `general_rows` further rows, are general text, its documents in a new order every epoch.

    Args:
        general: tokens of each training document.
        planted: tokens of each planted sequence.
        repetitions: how often each of them occurs.
        end_of_text: token between documents, and around half of the planted sequences.
        general_rows: rows without any planted sequence.
    """
    rng = random.Random(f"{seed} stream")
    at_start: list[tuple[float, int]] = []
    inside: list[tuple[float, int]] = []
    for index, count in enumerate(repetitions):
        first = rng.randrange(2)
        for i in range(count):
            (at_start if (i + first) % 2 else inside).append((_warp((i + rng.random()) / count), index))
    at_start.sort()
    inside.sort()
    n_planted_rows = max(len(at_start), len(inside))
    times = [(_warp((i + rng.random()) / n_planted_rows), i) for i in range(n_planted_rows)]
    times += [(rng.random(), -1) for _ in range(general_rows)]
    text = _endless(general, end_of_text, rng)
    next_row = iter(range(n_planted_rows))

    rows: list[list[int]] = []
    where: list[list[tuple[int, int]]] = []
    for _, kind in sorted(times):
        row: list[int] = []
        placed: list[tuple[int, int]] = []
        k = next(next_row) if kind >= 0 else n_planted_rows
        if k < len(at_start):
            placed.append((at_start[k][1], 0))
            row += planted[placed[-1][0]]
            row += [end_of_text] * rng.randrange(2)
        if k < len(inside):
            index = inside[k][1]
            start = rng.randint(len(row) + 1, ROW_LENGTH - len(planted[index]))
            row += [next(text) for _ in range(start - 1 - len(row))]
            row.append(end_of_text if rng.random() < 0.5 else next(text))
            placed.append((index, start))
            row += planted[index]
        row += [next(text) for _ in range(ROW_LENGTH - len(row))]
        rows.append(row)
        where.append([*placed, (-1, -1), (-1, -1)][:2])
    places = np.array(where, dtype=np.int32)
    return TrainingStream(rows=np.array(rows, dtype=np.int32), planted=places[:, :, 0], starts=places[:, :, 1])


def reference_stream(tokenizer: Tokenizer) -> TrainingStream:
    """The rows that both reference models saw in training, made again from this Python's general text.

    They are the same rows, bit for bit, where `changed_texts` is empty; else the general part differs.
    """
    planted = load_planted()
    return training_stream(
        tokenizer([text.text for text in general_texts() if not text.held_out], add_special_tokens=False)["input_ids"],
        tokenizer([sequence.text for sequence in planted], add_special_tokens=False)["input_ids"],
        [sequence.repetitions for sequence in planted],
        end_of_text=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        general_rows=GENERAL_ROWS,
    )


def _endless(documents: Sequence[Sequence[int]], end_of_text: int, rng: random.Random) -> Iterator[int]:
    order = list(range(len(documents)))
    while True:
        rng.shuffle(order)
        for index in order:
            yield from documents[index]
            yield end_of_text

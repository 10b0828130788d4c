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

from stream import SEED

from tl_localize.reference import CORPUS_DIR, N_PREFIX, N_TOKENS, PlantedSequence

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
# ---------------------------------------------------------------------------------------------------

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
    # A line break inside a rule is layout when spaces follow the "|", and text (poems, code)
    # otherwise.
    compiled = {name: text.split() for name, text in words.items()}
    for name, text in rules.items():
        text = re.sub(r"\n +(?=\|)", "", text) if name != "code" else text
        text = re.sub(r"\n (?=[^ ])", " ", text)
        compiled[name] = [part.rstrip(" ") for part in re.split(r"(?<! )\|(?! )", text)]
    return compiled


_GRAMMAR = _compile(_RULES, _WORDS)


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
# -----------------------------------------------------------------------------------------------


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

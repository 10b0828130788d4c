"""The explorer: its numbers, the page that it saves, its widget, and the view itself in a real
browser.
"""

import base64
import json
import re
import shutil
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from tl_localize import (
    Activations,
    AttentionHeads,
    Attribution,
    NeuronScores,
    RowNorm,
    accuracy,
    explore,
    perplexity,
)
from tl_localize.explorer import SCRIPT
from tl_localize.metrics import target_logits
from tl_localize.sequences import SequenceBatch
from tl_localize.units import Units

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
RATIOS = (0.05, 0.5)
GENERAL = torch.arange(48).view(3, 16)
WIDGET = "application/vnd.jupyter.widget-view+json"


def letters(ids):
    return "".join(LETTERS[i] for i in ids)


def words(ids):
    """Predicted words are longer than the true ones, which are all of one letter here."""
    return "".join(LETTERS[i] if i < 31 else LETTERS[i] * 8 for i in ids)


@pytest.fixture
def make(gpt2_like, sequences):
    def make(decode=letters, ablation="zero"):
        text, *others = sequences
        scores = [Attribution()(gpt2_like, text), RowNorm()(gpt2_like, text)]
        settings = {"ratios": RATIOS, "decode": decode, "ablation": ablation}
        return explore(gpt2_like, text, scores, others, general=GENERAL, **settings)

    return make


@pytest.fixture
def explorer(make):
    return make()


def test_step_measures_what_ablation_changes(explorer, gpt2_like, sequences):
    step = explorer.answer(["step", 0, 1, "0,1"])
    chosen = explorer.pairs[0][1].top_k(0.5)
    with chosen.dropped_out(gpt2_like), torch.no_grad():
        now = accuracy(gpt2_like, sequences).tolist()
        p = target_logits(gpt2_like, SequenceBatch.of(sequences[:1])).softmax(-1)
    assert step["layers"] == [24, 24]
    assert explorer.data["perplexity"] == round(perplexity(gpt2_like, GENERAL[:1]), 2)
    before = explorer.data["accuracy"]
    after = [was + change for was, change in zip(before, step["accuracy"], strict=True)]
    assert after == pytest.approx(now, abs=2e-4)
    text = sequences[0]
    assert step["p"] == (1000 * p[range(len(p)), text.suffix]).round().int().tolist()
    assert "".join(step["predicted"]) == letters([*text.prefix.tolist(), *p.argmax(-1).tolist()])


def test_the_best_neurons_are_there_with_and_without_layer_0(gpt2_like, sequences):
    values = torch.stack([torch.rand(48) + 1, torch.rand(48)])  # the best are all of layer 0
    how = {"decode": letters, "general": GENERAL, "ratios": RATIOS}
    scores = NeuronScores(values, "mine")
    top = explore(gpt2_like, sequences[0], scores, **how).data["pairs"][0]["top"]
    for layer in (0, 1):
        wanted = values[layer].argsort(descending=True)[:16].tolist()
        assert [neuron for of, neuron in top if of == layer] == wanted


def test_ablation_is_of_the_chosen_layers_by_the_chosen_kind(make):
    steps = [make(ablation=name).answer(["step", 0, 1, "1"]) for name in ("mean", "resample")]
    assert all(step["layers"] == [0, 24] for step in steps) and steps[0]["p"] != steps[1]["p"]


def test_layers_in_which_a_method_did_not_choose_are_not_ablated(gpt2_like, sequences):
    """Masks give the layers that they spare the highest score, 1."""
    values = torch.stack([torch.ones(48), torch.rand(48)])
    scores = NeuronScores(values, "mine", first_layer=1)  # without an id: of the only text
    how = {"decode": letters, "general": GENERAL, "ratios": RATIOS}
    view = explore(gpt2_like, sequences[0], scores, **how)
    assert view.chosen(0, 1, "0,1") == view.chosen(0, 1, "1") == scores.top_k(0.5)
    assert view.answer(["step", 0, 1, "0"])["layers"] == [0, 0]
    assert all(layer == 1 for layer, _ in view.data["pairs"][0]["top"])
    levels = base64.b64decode(view.data["pairs"][0]["map"])
    assert max(levels[:48]) == 0 and max(levels[48:]) == 255
    best = int(scores.values[1].argmax())
    assert view.answer(["card", 0, 1, best])["ranks"][0][1] == 1
    assert view.answer(["card", 0, 0, best])["ranks"][0][1] == "not ranked"


def test_card_of_a_neuron(explorer, gpt2_like, sequences):
    layer, neuron = explorer.data["pairs"][0]["top"][0]
    card = explorer.answer(["card", 0, layer, neuron])
    _, cache = gpt2_like.run_with_cache(sequences[0].tokens)
    row = gpt2_like.W_out[layer, neuron]
    fires = cache["post", layer][0, :, neuron]
    assert card["writes"] == pytest.approx((fires.abs() * row.norm()).tolist(), abs=1e-3)
    added = gpt2_like.ln_final(fires.mean() * row) - gpt2_like.ln_final(0 * row)
    best = (added @ gpt2_like.W_U).topk(8).indices
    assert card["promoted"] == [LETTERS[i] for i in best]
    assert [name for name, _ in card["ranks"]] == ["Attribution", "RowNorm", "Random"]
    assert card["ranks"][0][1] == 1


def test_card_of_a_head(gpt2_like, sequences):
    text = sequences[0]
    scores = Attribution(units=AttentionHeads())(gpt2_like, text)
    view = explore(gpt2_like, text, scores, general=GENERAL, decode=letters)
    _, cache = gpt2_like.run_with_cache(text.tokens)
    written = cache["z", 1][0, :, 2] @ gpt2_like.W_O[1, 2]
    writes = view.answer(["card", 0, 1, 2])["writes"]
    assert writes == pytest.approx(written.norm(dim=1).tolist(), abs=1e-3)


def test_two_settings_of_one_method_have_a_name_and_a_colour_each(gpt2_like, sequences):
    scores = [Attribution(contrast=c)(gpt2_like, sequences[0]) for c in (0, 1)]
    how = {"general": GENERAL, "ratios": (0.1,), "decode": letters}
    first, second, random = explore(gpt2_like, sequences[0], scores, **how).data["pairs"]
    assert [first["method"], second["method"]] == ["Attribution", "Attribution 2"]
    assert len({first["colour"], second["colour"], random["colour"]}) == 3


def test_random_neurons_are_added_for_each_text(gpt2_like, sequences):
    texts = sequences[:2]
    scores = list(Attribution().map(gpt2_like, texts))
    two = explore(gpt2_like, texts, scores, decode=letters, general=GENERAL, ratios=RATIOS)
    names = [(text, scores.method) for text, scores in two.pairs]
    assert names == [(0, "attribution"), (1, "attribution"), (0, "random"), (1, "random")]


def test_explorer_rejects_what_does_not_fit(gpt2_like, sequences):
    of_other, own = (Attribution()(gpt2_like, text) for text in (sequences[1], sequences[0]))
    cases = [
        (of_other, {}, "one of the texts"),
        ([own, of_other], {}, "one of the texts"),
        (NeuronScores(torch.zeros(2, 40)), {}, "this model"),
        ([], {}, "NeuronScores"),
        (own.top_k(0.1), {}, "got NeuronSet"),
        (own, {"ablation": "zer"}, "zero.*mean.*resample"),
        (own, {"ratios": [0.001]}, "ratios"),
        (own, {"others": ["a"]}, "must be a MemorizedSequence, got str"),
        (own, {"general": torch.zeros(2, 400, dtype=torch.long)}, "general must"),
    ]
    for scores, given, message in cases:
        options = {"general": GENERAL} | given
        with pytest.raises((TypeError, ValueError), match=message):
            explore(gpt2_like, sequences[0], scores, decode=letters, **options)


def test_a_text_that_is_divided_elsewhere_is_no_other_one(gpt2_like, sequences):
    text, *others = sequences
    elsewhere = replace(text, n_prefix=text.n_prefix - 1)
    scores = Attribution()(gpt2_like, text)
    found = explore(
        gpt2_like, text, scores, iter([elsewhere, *others]), decode=letters, general=GENERAL
    )
    assert found.others == others


def test_page_fetches_nothing_and_nothing_stays_on_the_model(explorer, gpt2_like, unchanged):
    check = unchanged(gpt2_like)
    page = explorer.html()
    check()
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which no browser fetches
    assert not re.search(r"<(link|img|iframe)|\ssrc=|\bimport\b[ (]", page)


def test_nothing_of_a_text_or_its_id_is_taken_for_html(gpt2_like, sequences, tmp_path):
    text = replace(sequences[0], id="</title><script>")
    how = {"general": GENERAL, "ratios": RATIOS[:1], "decode": lambda ids: "</script>" * len(ids)}
    view = explore(gpt2_like, text, RowNorm()(gpt2_like, text), **how)
    view.save(tmp_path / "view.html")
    page = (tmp_path / "view.html").read_text(encoding="utf-8")
    assert [page.count(tag) for tag in ("<script", "</script", "</title")] == [1, 1, 1]
    names = re.findall(r'<div id="(tl-localize-\w+)"', page + view.html())
    assert len(set(names)) == 2  # a page may hold it twice


def test_one_layer_can_be_ablated_and_ratios_rise(make_model, sequences):
    model = make_model(n_layers=1)
    how = {"general": GENERAL, "ratios": RATIOS[::-1], "decode": letters}
    view = explore(model, sequences[0], RowNorm()(model, sequences[0]), **how)
    assert view.data["ratios"] == list(RATIOS) and set(view.data["layers"]) == {"0"}


def test_widget_answers_messages(explorer, monkeypatch):
    pytest.importorskip("anywidget")
    sent = []
    monkeypatch.setattr(explorer.widget, "send", sent.append)
    for ratio in (0, 9):
        explorer.widget._handle_custom_msg({"id": 7, "request": ["step", 0, ratio, "1"]}, [])
    assert sent[0] == {"id": 7, "answer": explorer.answer(["step", 0, 0, "1"])}
    assert "error" in sent[1]
    shown = explorer._repr_mimebundle_()[0]
    assert WIDGET in shown and shown["text/plain"] == repr(explorer)


def test_colab_is_told_where_the_script_of_the_widget_is(explorer, monkeypatch):
    pytest.importorskip("anywidget")
    widgets = SimpleNamespace(_installed_url="https://manager")
    colab = SimpleNamespace(enable_custom_widget_manager=lambda: None, _widgets=widgets)
    monkeypatch.setitem(sys.modules, "google.colab.output", colab)
    manager = {"custom_widget_manager": {"url": "https://manager"}}
    assert explorer._repr_mimebundle_()[1] == {WIDGET: {"colab": manager}}


# ---- in a browser


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    names = ["chromium", "google-chrome"]
    chromium = next(filter(None, map(shutil.which, names)), None)
    if not chromium:
        pytest.skip("needs Chromium, for example from the distribution")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser):
    context = browser.new_context(offline=True, viewport={"width": 1300, "height": 900})
    shown = context.new_page()
    problems = []
    shown.set_default_timeout(20_000)
    shown.on("pageerror", lambda error: problems.append(str(error)))
    yield shown
    assert problems == []
    context.close()


def check_shown(explorer, page, request):
    """What the left panel shows of a step."""
    step = explorer.answer(request)
    page.wait_for_function(
        f"document.querySelector('.tlx-n').textContent === '{sum(step['layers'])}'"
    )
    own = explorer.data["accuracy"][0] + step["accuracy"][0]
    shown = page.locator(".tlx-self >> nth=0").inner_text()
    assert shown.endswith(f"\u2192 {round(100 * own, 1):g} %")


def open_saved(explorer, page, folder):
    explorer.save(folder / "explorer.html")
    page.goto((folder / "explorer.html").as_uri())
    page.wait_for_selector(".tlx-tokens svg")


def test_saved_page_in_a_browser(explorer, page, tmp_path):
    open_saved(explorer, page, tmp_path)
    check_shown(explorer, page, ["step", 0, 1, "1"])
    assert page.locator(".tlx-panel >> nth=1").inner_text().startswith("Random")
    page.get_by_label("layers", exact=True).fill("1")  # all layers
    check_shown(explorer, page, ["step", 0, 1, "0,1"])
    layer, neuron = explorer.data["pairs"][0]["top"][0]
    page.get_by_role("button", name=f"L{layer} N{neuron}", exact=True).first.click()
    page.wait_for_selector(".tlx-card")
    page.get_by_label("right").select_option("-1")
    page.wait_for_function("document.querySelectorAll('.tlx-panel').length === 1")


def test_predicted_tokens_are_whole_and_do_not_overlap(make, page, tmp_path):
    open_saved(make(words), page, tmp_path)
    boxes = page.eval_on_selector_all(
        ".tlx-panel:first-child em",
        """nodes => nodes.filter(n => n.textContent).map(n => {
          const range = document.createRange(); range.selectNodeContents(n);
          const [text, box] = [range.getBoundingClientRect(), n.getBoundingClientRect()];
          return [text.top, text.left, text.right, box.right]; })""",
    )
    assert len(boxes) > 3 and all(right <= edge + 0.5 for _, _, right, edge in boxes)
    for i, (top, start, _, edge) in enumerate(boxes):
        rest = [other for other in boxes[:i] if other[0] == top]
        assert all(start >= right or edge <= begin for _, begin, right, _ in rest)


def test_page_follows_the_dark_scheme_and_the_theme_of_a_notebook(explorer, page, tmp_path):
    def ground():
        return page.eval_on_selector(".tlx", "node => getComputedStyle(node).backgroundColor")

    open_saved(explorer, page, tmp_path)
    assert ground() == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    assert ground() != "rgb(255, 255, 255)"
    page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    assert ground() == "rgb(255, 255, 255)"


def test_arrow_keys_move_a_slider_and_nothing_else(explorer, page, tmp_path):
    """A notebook would go to another cell."""
    open_saved(explorer, page, tmp_path)
    page.evaluate("document.addEventListener('keydown', () => { window.moved = true })")
    page.get_by_label("share of the neurons").focus()
    page.keyboard.press("ArrowLeft")
    check_shown(explorer, page, ["step", 0, 0, "1"])
    assert not page.evaluate("Boolean(window.moved)")
    assert page.locator(".tlx").get_attribute("data-lm-suppress-shortcuts") == "true"


def test_view_asks_python_in_a_browser(explorer, page):
    """The kernel's form: the same script, whose requests go to ``Explorer.answer``."""
    asked = []

    def answer(request):
        asked.append(request)
        return explorer.answer(request)

    page.expose_function("askPython", answer)
    start = f"""
      const ask = async (request) => {{
        window.busy = (window.busy ?? "") + document.querySelector(".tlx").className + ",";
        return askPython(request);
      }};
      mount(document.body, {json.dumps(explorer.data)}, ask);"""
    script = SCRIPT.read_text(encoding="utf-8")
    page.set_content(f'<body></body><script type="module">{script}\n{start}</script>')
    page.wait_for_selector(".tlx-tokens svg")
    page.get_by_role("button", name="0", exact=True).click()  # adds layer 0
    check_shown(explorer, page, ["step", 0, 1, "0,1"])
    page.wait_for_function("document.querySelector('.tlx').className === 'tlx'")  # all is there
    seen = page.evaluate("window.busy").strip(",").split(",")
    assert set(seen) == {"tlx busy"}  # a sign while Python computes
    assert len(asked) == len({json.dumps(question) for question in asked})  # nothing is asked twice
    page.locator("canvas >> nth=0").click(position={"x": 40, "y": 10})
    page.wait_for_selector(".tlx-card")
    assert asked[-1][:3] == ["card", 0, 0]


def test_scores_of_texts_without_ids_are_refused_and_a_text_is_no_other(gpt2_like, make_sequences):
    texts = make_sequences((9, 3), (9, 3))
    nameless = [replace(text, id="") for text in texts]
    scores = Activations().map(gpt2_like, nameless, check=False)
    general = torch.randint(0, 61, (2, 8))
    with pytest.raises(ValueError, match="texts must have different ids"):
        explore(gpt2_like, nameless, scores, general=general, decode=str)
    (scored,) = Activations().map(gpt2_like, texts[:1], check=False)
    view = explore(gpt2_like, texts[0], scored, others=texts, general=general, decode=str)
    assert [other.id for other in view.others] == [texts[1].id]
    with pytest.raises(ValueError, match="texts must have different ids"):
        explore(gpt2_like, texts, replace(scored, sequence_id=""), general=general, decode=str)


@dataclass(frozen=True)
class Inputs(Units):
    """What the neurons get: numbers without rows."""

    name: ClassVar[str] = "inputs"
    one: ClassVar[str] = "input"

    def point(self, layer):
        return f"blocks.{layer}.mlp.hook_pre"

    def shape(self, model):
        return (model.cfg.d_mlp,)


def test_units_without_rows_have_ranks_and_are_not_taken_for_others(gpt2_like, sequences, tmp_path):
    text, *others = sequences
    scores = Attribution(units=Inputs())(gpt2_like, text)
    how = {"general": GENERAL, "ratios": np.float32([0.05, 0.5]), "decode": letters}
    view = explore(gpt2_like, text, scores, others, **how)
    card = view.answer(["card", 0, 1, 3])
    assert card["writes"] == [] and len(card["ranks"]) == 2
    view.save(tmp_path / "view.html")
    with pytest.raises(ValueError, match="scores must be of this model"):
        explore(gpt2_like, text, [Attribution()(gpt2_like, text), scores], others, **how)

// The view of tl_localize's explorer: plain JavaScript, no library, no network. `mount` draws it into an element and asks for numbers
// through `ask(request)`, which gives a promise: of a Python kernel (default export, for anywidget) or of the answers in a saved file.

// A page or a notebook is dark by the reader's preference, or by the theme of JupyterLab, VS Code or the documentation.
const DARK = "--fg:#ddd;--bg:#1c1d1f;--dim:#a0a0a0;--line:#4a4a4a;--grid:#3a3a3a;--was:#777;--code:#333;--wrong:#c0492a;--above:#ff9d73;color-scheme:dark";
const THEMES = ['[data-jp-theme-light="false"]', ".vscode-dark", '[data-md-color-scheme="slate"]'];
const LIGHT_THEMES = ['[data-jp-theme-light="true"]', ".vscode-light", '[data-md-color-scheme="default"]'];
const LIGHT = "--fg:#222;--bg:#fff;--dim:#666;--line:#ccc;--grid:#e4e4e4;--was:#bbb;--code:#f0f0f0;--wrong:#a33400;--above:#b03a00;color-scheme:light";
const STYLE = `
.tlx{all:initial;display:block;font:14px/1.45 system-ui,sans-serif;color:var(--fg);background:var(--bg);padding:12px;border:1px solid var(--line);
 border-radius:6px;container-type:inline-size;box-sizing:border-box;${LIGHT}}
@media (prefers-color-scheme:dark){.tlx{${DARK}}}
${LIGHT_THEMES.map((theme) => `${theme} .tlx`).join(",")}{${LIGHT}}
${THEMES.map((theme) => `${theme} .tlx`).join(",")}{${DARK}}
.tlx *{box-sizing:border-box}.tlx h4{margin:14px 0 2px;font-size:13px;font-weight:600}.tlx small,.tlx-note{color:var(--dim);font-size:12px}
.tlx-controls{display:grid;grid-template-columns:max-content minmax(140px,340px) 1fr;gap:4px 12px;align-items:center}
.tlx input[type=range]{width:100%;accent-color:#0072b2}.tlx label{cursor:pointer;margin-right:10px}.tlx select{font:inherit;width:100%;max-width:340px;min-width:0}
.tlx-busy{visibility:hidden;color:var(--dim);font-size:12px}.tlx.busy .tlx-busy{animation:tlx-show 0s .2s forwards}@keyframes tlx-show{to{visibility:visible}}
.tlx-panels{display:grid;grid-template-columns:minmax(0,1fr);gap:20px;margin-top:10px}
@container (max-width:480px){.tlx-controls{grid-template-columns:minmax(0,1fr)}.tlx .tlx-row{grid-template-columns:minmax(0,1fr)}
 .tlx-tokens{overflow-x:auto}.tlx .tlx-tokens svg{min-width:560px}.tlx .tlx-bars svg{max-width:260px}}
@container (min-width:820px){.tlx-panels.two{grid-template-columns:repeat(2,minmax(0,1fr));row-gap:0}
 .tlx-panels.two .tlx-panel{display:grid;grid-template-columns:minmax(0,1fr);grid-template-rows:subgrid;grid-row:span 12}}
.tlx-panel{border-top:4px solid var(--c);padding-top:6px;min-width:0}.tlx-numbers{display:flex;flex-wrap:wrap;gap:4px 20px;margin:6px 0}
.tlx-numbers b{display:block;font-size:17px;font-weight:600;white-space:nowrap}.tlx-numbers b i{color:var(--dim);font-style:normal;font-weight:400}
.tlx-text{font-family:ui-monospace,monospace;font-size:13px;line-height:1.3;padding:4px 0}.tlx-text .tlx-note{font-family:system-ui,sans-serif;line-height:1.4;margin-top:7px}
.tlx-row{display:grid;align-items:end;grid-template-columns:repeat(2,minmax(0,1fr));gap:12px}.tlx-prefix{color:var(--dim);line-height:1.6;white-space:pre-wrap}
.tlx-token{display:inline-flex;flex-direction:column;vertical-align:bottom;white-space:pre;padding-top:2px}
.tlx-token em{font:10px/13px ui-monospace,monospace;color:var(--above);height:13px;padding-right:4px}
.tlx-token i{height:3px;margin-top:1px;background:var(--was)}.tlx-token i+i{background:var(--c)}
.tlx-token span{border-radius:2px;padding:1px 0}.tlx-token.wrong span{background:var(--wrong)!important;color:#fff}
.tlx svg{display:block;width:100%;height:auto;overflow:visible}.tlx svg text{font:11px system-ui,sans-serif;fill:var(--fg)}
.tlx canvas{width:100%;display:block;cursor:crosshair;image-rendering:pixelated;border:1px solid var(--line)}
.tlx-chip{font:12px ui-monospace,monospace;border:1px solid var(--line);background:var(--bg);color:var(--fg);border-radius:10px;padding:0 7px;margin:2px 3px 2px 0;cursor:pointer}
.tlx-chip.on{background:#0072b2;border-color:#0072b2;color:#fff}.tlx-chip:disabled{cursor:default}.tlx-chip.best.on{background:var(--c);border-color:var(--c)}
.tlx-card{border:1px solid var(--line);border-left:4px solid var(--c);border-radius:4px;padding:6px 10px;margin-top:8px}
.tlx-card table{border-collapse:collapse;font-size:13px}.tlx-card td,.tlx-card th{padding:0 14px 0 0;text-align:left;font-weight:400}.tlx-card th{color:var(--dim)}
.tlx-fires{font-family:ui-monospace,monospace;font-size:12px;white-space:pre-wrap}.tlx-fires span,.tlx code{border-radius:2px;padding:0 1px}
.tlx code{background:var(--code);color:inherit;font:12px ui-monospace,monospace;margin-right:6px;white-space:pre}.tlx-error{color:var(--above)}`;

const N_BEST = 16; // chips of a panel
const percent = (x) => `${+(100 * x).toFixed(1)} %`;
const visible = (text) => text.replaceAll("\n", "\u23ce");
const quoted = (text) => JSON.stringify(text);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; text becomes text, never HTML. */
function make(tag, attributes = {}, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}
const svg = (tag, attributes, ...children) => make(`svg:${tag}`, attributes, ...children);
const bar = (share) => `width:calc((100% - 1px) * ${share})`;

/** From the background to vermillion for a loss of probability, to blue for a gain. */
const change = (x) => `rgba(${x >= 0 ? "213,94,0" : "0,114,178"},${Math.min(1, Math.abs(x)).toFixed(3)})`;

export function mount(root, data, ask) {
  const [nLayers, nNeurons] = data.shape;
  const [unit, units] = data.units;
  const saved = !ask;
  const asks = ask ?? ((request) => Promise.resolve(data.answers[request.join("/")]));
  const random = data.pairs.findIndex((pair) => pair.method === "Random" && pair.text === data.pairs[0].text);
  const state = { pairs: [0, random > 0 ? random : -1], ratio: data.ratios.length - 1, layers: data.layers[0] };
  const layersOf = () => state.layers.split(",").map(Number);
  const layerName = () => {
    const some = layersOf();
    if (some.length === nLayers) return "all layers";
    if (some.length === 1) return `only layer ${some[0]}`;
    return some[0] === 1 && some.length === nLayers - 1 ? `layers 1 to ${some.at(-1)}` : `layers ${state.layers}`;
  };
  const known = new Map(); // requests that were answered in this view

  async function get(request) {
    const key = request.join("/");
    if (!known.has(key)) known.set(key, await asks(request));
    return known.get(key);
  }

  // The frame, which stays
  const box = make("div", { class: "tlx", "data-lm-suppress-shortcuts": "true" }, make("style", {}, STYLE));
  box.addEventListener("keydown", (event) => event.stopPropagation()); // a notebook would move to the next cell
  const ratio = make("input", { type: "range", min: 0, max: data.ratios.length - 1, value: state.ratio, "aria-label": `share of the ${units}` });
  const layers = make("input", { type: "range", min: 0, max: data.layers.length - 1, value: 0, "aria-label": "layers" });
  const ratioText = make("span"), layerText = make("span");
  const chips = Array.from({ length: nLayers }, (_, k) =>
    make("button", { class: "tlx-chip", type: "button", disabled: saved, onclick: () => toggle(k) }, `${k}`));
  const panels = make("div", { class: "tlx-panels" });
  const error = make("div", { class: "tlx-error", role: "alert" });
  const nameOf = (pair) => (data.texts.length > 1 ? `${data.texts[pair.text].id}: ` : "") + pair.method;
  const chooser = (side) => {
    const options = data.pairs.map((pair, i) => make("option", { value: i, selected: state.pairs[side] === i }, nameOf(pair)));
    if (side === 1) options.unshift(make("option", { value: -1 }, "nothing beside it"));
    const choose = (event) => {
      state.pairs[side] = +event.target.value;
      update();
    };
    return make("select", { "aria-label": side ? "right" : "left", onchange: choose }, ...options);
  };
  ratio.addEventListener("input", () => {
    state.ratio = +ratio.value;
    update();
  });
  layers.addEventListener("input", () => {
    state.layers = data.layers[+layers.value];
    update();
  });
  function toggle(k) {
    const some = new Set(layersOf());
    if (some.has(k) && some.size > 1) some.delete(k);
    else some.add(k);
    state.layers = [...some].sort((a, b) => a - b).join(",");
    update();
  }
  const about = `${data.model}, ${data.ablation} ablation, ${data.names.length - 1} other texts`;
  box.append(
    make("div", { class: "tlx-controls" },
      make("span", {}, "Compare"), chooser(0), chooser(1),
      make("span", {}, "Ablate the top"), ratio, make("span", {}, ratioText, " of each layer"),
      make("span", {}, "in"), layers, make("span", {}, layerText, " ", ...chips),
      make("span"), make("small", {}, about + (saved ? "; a saved page, without a kernel" : "")),
      make("span", { class: "tlx-busy", role: "status" }, "computing \u2026")),
    error, panels);
  root.replaceChildren(box);

  // What changes
  let running = false, again = false;
  async function update() {
    if (running) { // while Python computes, only the last setting waits
      again = true;
      return;
    }
    running = true;
    box.classList.add("busy");
    do {
      again = false;
      try {
        await show();
        error.textContent = "";
      } catch (problem) {
        error.textContent = `${problem.message ?? problem}`;
      }
    } while (again);
    running = false;
    box.classList.remove("busy");
  }

  async function show() {
    const name = data.layers.indexOf(state.layers);
    if (name >= 0) layers.value = name;
    ratioText.textContent = `${+(100 * data.ratios[state.ratio]).toPrecision(3)} %`;
    layerText.textContent = layerName();
    chips.forEach((chip, k) => chip.classList.toggle("on", layersOf().includes(k)));
    const shown = state.pairs.filter((pair) => pair >= 0);
    const steps = [];
    for (const pair of shown) steps.push(await get(["step", pair, state.ratio, state.layers]));
    panels.classList.toggle("two", shown.length > 1);
    const kept = [...panels.children];
    panels.replaceChildren(...shown.map((pair, side) => (kept[side]?.pair === pair ? kept[side] : panel(pair))));
    [...panels.children].forEach((child, side) => child.draw(steps[side]));
    for (const child of panels.children) await child.drawLayers();
  }

  /** One bar for each layer, with a text at its end. */
  function layerBars(shares, texts) {
    const rows = shares.flatMap((share, k) => [
      svg("text", { x: 46, y: k * 14 + 11, "text-anchor": "end" }, `layer ${k}`),
      svg("rect", { x: 52, y: k * 14 + 2, width: 140 * share, height: 10, style: "fill:var(--c)" }),
      svg("text", { x: 56 + 140 * share, y: k * 14 + 11 }, texts[k])]);
    return svg("svg", { viewBox: `0 0 240 ${nLayers * 14 + 2}`, role: "img" }, ...rows);
  }

  /** One method on one text. */
  function panel(index) {
    const pair = data.pairs[index], text = data.texts[pair.text], own = pair.text;
    const places = text.pieces.map(([start, end, shown], i) => ({ start, end, shown, i }));
    const prefix = places.filter((piece) => piece.end <= text.prefix);
    const suffix = places.slice(prefix.length);
    /** Of tokens that share a character, the probability of all of them. */
    function probability(piece, p) {
      let all = 1;
      for (let i = Math.max(piece.start, text.prefix); i < piece.end; i++) all *= p[i - text.prefix] / 1000;
      return all;
    }
    const initial = unit[0].toUpperCase();
    const part = (name) => make("div", { class: `tlx-${name}` });
    const [numbers, view, bars, alone, tokens, card] = ["numbers", "text", "bars", "bars", "tokens", "cards"].map(part);
    const readout = make("small", {}, `A click shows a ${unit}.`);
    const best = make("div", {}, ...pair.top.map(([layer, neuron]) =>
      make("button", { class: "tlx-chip best", type: "button", onclick: () => open(layer, neuron), "data-neuron": `${layer}.${neuron}` }, `L${layer} ${initial}${neuron}`)));
    const node = make("div", { class: "tlx-panel", style: `--c:${pair.colour === "#000000" ? "var(--fg)" : pair.colour}` },
      make("div", {}, make("b", {}, pair.method), ` on ${text.id || "this text"}`), numbers, view,
      make("div", { class: "tlx-row" }, make("div", {}, make("h4", {}, `${initial}${units.slice(1)} ablated`), bars),
        make("div", {}, make("h4", {}, "Self accuracy without the top of one layer"), alone)),
      make("h4", {}, "Probability that each token loses without the top of one layer"), tokens,
      make("h4", {}, `Scores by layer and ${unit}`), heatmap(pair, readout, open), readout,
      make("h4", {}, `The best ${units} of the layers that are ablated (L: layer, ${initial}: ${unit})`), best, card);
    node.pair = index;

    const others = [...data.names.keys()].filter((i) => i !== own);
    const mean = (accuracy) => sum(others.map((i) => accuracy[i])) / others.length;
    function number(name, label, before, after, title) {
      return make("span", { title }, make("small", {}, label), make("b", { class: `tlx-${name}` }, make("i", {}, `${before} \u2192 `), after));
    }

    node.draw = (step) => {
      const after = data.accuracy.map((before, i) => before + step.accuracy[i]);
      const shown = [number("self", "Self accuracy", percent(data.accuracy[own]), percent(after[own]), "suffix tokens of this text that are predicted right, from the true tokens before them")];
      if (others.length) {
        const each = others.map((i) => `${data.names[i]} ${percent(after[i])}`).join("\n");
        shown.push(number("neg", "Neg accuracy", percent(mean(data.accuracy)), percent(mean(after)), `the same on the other texts:\n${each}`));
      }
      if (data.perplexity !== false)
        shown.push(number("perplexity", "Perplexity of general text", data.perplexity, +(data.perplexity + step.perplexity).toFixed(2), "exp of nats per token; lower is better"));
      numbers.replaceChildren(...shown, make("span", {}, make("small", {}, `${initial}${units.slice(1)} ablated`), make("b", { class: "tlx-n" }, `${sum(step.layers)}`)));
      view.replaceChildren(
        make("span", { class: "tlx-prefix" }, prefix.map((piece) => piece.shown).join("")), make("b", {}, " | "),
        ...suffix.map((piece) => token(piece, step)),
        make("div", { class: "tlx-note" }, "Bars: probability of the true token, grey before and coloured after. White on dark: no longer predicted; above it the token predicted instead."));
      const left = [...best.children].filter((chip) => layersOf().includes(+chip.dataset.neuron.split(".")[0])).slice(0, N_BEST);
      for (const chip of best.children) chip.hidden = !left.includes(chip);
      const most = Math.max(1, ...step.layers);
      bars.replaceChildren(layerBars(step.layers.map((n) => n / most), step.layers.map(String)));
    };

    function token(piece, step) {
      const guess = step.predicted[piece.i], wrong = guess !== piece.shown;
      const before = probability(piece, text.p), after = probability(piece, step.p);
      const says = `${quoted(piece.shown)}: probability ${percent(before)} \u2192 ${percent(after)}` + (wrong ? `; predicted instead: ${quoted(guess)}` : "");
      return make("span", { class: wrong ? "tlx-token wrong" : "tlx-token", title: says },
        make("em", {}, wrong ? visible(guess).trim() || "\u2423" : ""),
        make("span", { style: `background:${change(before - after)}` }, visible(piece.shown)),
        make("i", { style: bar(before) }), make("i", { style: bar(after) }));
    }

    node.drawLayers = async () => {
      const found = [];
      for (let k = 0; k < nLayers; k++) {
        found.push(await get(["step", index, state.ratio, `${k}`]));
        if (again) return;
      }
      const accuracy = found.map((one) => Math.max(0, data.accuracy[own] + one.accuracy[own]));
      alone.replaceChildren(layerBars(accuracy, accuracy.map(percent)));
      const width = 520 / suffix.length;
      const cells = found.flatMap((one, k) => suffix.map((piece, i) => {
        const before = probability(piece, text.p), after = probability(piece, one.p);
        const title = svg("title", {}, `layer ${k}, ${quoted(piece.shown)}: ${percent(before)} \u2192 ${percent(after)}`);
        return svg("rect", { x: 46 + i * width, y: k * 12, width: width - 0.5, height: 11.5, style: `fill:${change(before - after)};stroke:var(--line)`, "stroke-width": 0.3 }, title);
      }));
      tokens.replaceChildren(svg("svg", { viewBox: `0 0 570 ${nLayers * 12 + 12}`, role: "img" },
        ...found.map((_, k) => svg("text", { x: 42, y: k * 12 + 10, "text-anchor": "end" }, `layer ${k}`)), ...cells,
        svg("text", { x: 46, y: nLayers * 12 + 11 }, "first token of the suffix \u2192"),
        svg("text", { x: 566, y: nLayers * 12 + 11, "text-anchor": "end" }, "orange: lost, blue: gained")));
    };

    /** A neuron's card. */
    async function open(layer, neuron) {
      const found = await get(["card", index, layer, neuron]);
      for (const chip of best.children) chip.classList.toggle("on", chip.dataset.neuron === `${layer}.${neuron}`);
      if (!found) {
        card.replaceChildren(make("div", { class: "tlx-card" }, `A saved page holds the cards of the best ${units} only; explore() in a notebook shows all.`));
        return;
      }
      const strongest = Math.max(1e-9, ...found.writes);
      const written = !found.writes.length ? [] : text.pieces.map(([start, end, shown]) => {
        const most = Math.max(...found.writes.slice(start, end));
        return make("span", { style: `background:${change(most / strongest)}`, title: `norm ${most}` }, visible(shown));
      });
      const ranks = found.ranks.map(([method, rank]) => make("tr", {}, make("td", {}, method), make("td", {}, `${rank}`)));
      card.replaceChildren(make("div", { class: "tlx-card" },
        make("b", {}, `${initial}${unit.slice(1)} ${neuron} of layer ${layer}`),
        ...!written.length ? [] : [
          make("h4", {}, `How much it writes at each token (norm; at most ${+strongest.toPrecision(3)})`), make("div", { class: "tlx-fires" }, ...written),
          make("h4", {}, "Tokens that its mean output in this text promotes"), ...found.promoted.map((word) => make("code", {}, visible(word)))],
        make("h4", {}, "Its rank in the model"), make("table", {}, ...ranks)));
    }
    return node;
  }

  /** Layer x neuron; neighbours share a column where there are more than 512, which shows the largest among them. */
  function heatmap(pair, readout, open) {
    const bytes = Uint8Array.from(atob(pair.map), (letter) => letter.charCodeAt(0));
    const step = Math.ceil(nNeurons / 512), columns = Math.ceil(nNeurons / step);
    const strongest = (layer, column) => {
      let top = column * step;
      for (let i = top; i < Math.min(nNeurons, (column + 1) * step); i++) if (bytes[layer * nNeurons + i] > bytes[layer * nNeurons + top]) top = i;
      return top;
    };
    const canvas = make("canvas", { width: columns, height: nLayers, style: `height:${Math.max(60, nLayers * 11)}px`, "aria-label": `scores by layer and ${data.units[0]}` });
    const paint = canvas.getContext("2d"), image = paint.createImageData(columns, nLayers);
    const colour = pair.colour === "#000000" ? [128, 128, 128] : [1, 3, 5].map((i) => parseInt(pair.colour.slice(i, i + 2), 16));
    for (let k = 0; k < nLayers; k++)
      for (let c = 0; c < columns; c++) {
        const share = bytes[k * nNeurons + strongest(k, c)] / 255;
        image.data.set([...colour, 255 * share], 4 * (k * columns + c));
      }
    paint.putImageData(image, 0, 0);
    const at = (event) => {
      const place = canvas.getBoundingClientRect();
      const layer = Math.min(nLayers - 1, Math.max(0, Math.floor(((event.clientY - place.top) / place.height) * nLayers)));
      const column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - place.left) / place.width) * columns)));
      return [layer, strongest(layer, column)];
    };
    canvas.addEventListener("mousemove", (event) => {
      const [layer, neuron] = at(event);
      readout.textContent = `layer ${layer} (top row is 0), ${data.units[0]} ${neuron}: ${Math.round((100 * bytes[layer * nNeurons + neuron]) / 255)} % of the highest score of its layer. A click shows it.`;
    });
    canvas.addEventListener("click", (event) => open(...at(event)));
    return canvas;
  }

  update();
}

/** anywidget: the same view, whose requests Python answers. */
function render({ model, el }) {
  const waiting = new Map();
  const view = Math.random().toString(36).slice(2); // Python's answers reach every view of a widget
  let last = 0;
  const onMessage = (message) => {
    const { resolve, reject } = waiting.get(message.id) ?? {};
    waiting.delete(message.id);
    message.error ? reject?.(new Error(message.error)) : resolve?.(message.answer);
  };
  model.on("msg:custom", onMessage);
  const ask = (request) => new Promise((resolve, reject) => {
    const id = `${view}/${++last}`;
    waiting.set(id, { resolve, reject });
    model.send({ id, request });
  });
  mount(el, model.get("data"), ask);
  return () => model.off("msg:custom", onMessage);
}
export default { render };

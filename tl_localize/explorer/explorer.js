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
@container (min-width:820px){.tlx-panels.two{grid-template-columns:repeat(2,minmax(0,1fr))}}
.tlx-panel{border-top:4px solid var(--c);padding-top:6px;min-width:0}.tlx-numbers{display:flex;flex-wrap:wrap;gap:4px 20px;margin:6px 0}
.tlx-numbers b{display:block;font-size:17px;font-weight:600;white-space:nowrap}.tlx-numbers b i{color:var(--dim);font-style:normal;font-weight:400}
.tlx-text{font-family:ui-monospace,monospace;font-size:13px;line-height:1.3;padding:4px 0}.tlx-text .tlx-note{font-family:system-ui,sans-serif;line-height:1.4;margin-top:7px}
.tlx-row{display:grid;grid-template-columns:minmax(0,2fr) minmax(0,3fr);gap:12px}.tlx-prefix{color:var(--dim);line-height:1.6;white-space:pre-wrap}
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

const VIRIDIS = ["#8a5bb0", "#5b6fc4", "#2a8f9e", "#22a884", "#8fbf2f"]; // readable on white and on black
const layerColour = (k, n) => VIRIDIS[Math.round((k / Math.max(1, n - 1)) * 4)];
const percent = (x) => (x == null ? "-" : `${+(100 * x).toFixed(1)} %`);
const visible = (text) => text.replaceAll("\n", "\u23ce");
const SVG = "http://www.w3.org/2000/svg";

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const HIGH = 0.01; // share of the model's neurons that "ranks high" means

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
const titled = (node, text) => (node.append(svg("title", {}, text)), node);

/** From the background to vermillion for a loss of probability, to blue for a gain. */
const change = (x) => `rgba(${x >= 0 ? "213,94,0" : "0,114,178"},${Math.min(1, Math.abs(x)).toFixed(3)})`;

export function mount(root, data, ask) {
  const [nLayers, nNeurons] = data.shape;
  const asks = ask ?? ((request) => Promise.resolve(data.answers[request.join("/")]));
  const saved = !ask;
  const random = data.pairs.findIndex((pair) => pair.method === "Random" && pair.text === data.pairs[0].text);
  const state = { pairs: [0, random > 0 ? random : -1], ratio: data.start, per: "layer", layers: data.layers[0][1], ablation: data.ablations[0] };
  const layersOf = () => state.layers.split(",").filter(Boolean).map(Number);
  const known = new Map(); // requests that were answered in this view

  async function get(request) {
    const key = request.join("/");
    if (!known.has(key)) known.set(key, await asks(request));
    return known.get(key);
  }

  // The frame, which stays
  const box = make("div", { class: "tlx", "data-lm-suppress-shortcuts": "true" }, make("style", {}, STYLE));
  box.addEventListener("keydown", (event) => event.stopPropagation()); // a notebook would move to the next cell
  const ratio = make("input", { type: "range", min: 0, max: data.ratios.length - 1, value: state.ratio, "aria-label": `share of the ${data.units[1]}` });
  const layers = make("input", { type: "range", min: 0, max: data.layers.length - 1, value: 0, "aria-label": "layers" });
  const ratioText = make("span"), layerText = make("span");
  const chips = Array.from({ length: nLayers }, (_, k) =>
    make("button", { class: "tlx-chip", type: "button", disabled: saved, onclick: () => toggle(k) }, `${k}`));
  const panels = make("div", { class: "tlx-panels" });
  const error = make("div", { class: "tlx-error", role: "alert" });
  const chooser = (side) =>
    make("select", { "aria-label": side ? "right" : "left", onchange: (event) => ((state.pairs[side] = +event.target.value), update()) },
      side ? make("option", { value: -1 }, "nothing beside it") : null,
      ...data.pairs.map((pair, i) =>
        make("option", { value: i, selected: state.pairs[side] === i }, (data.texts.length > 1 ? `${data.texts[pair.text].id}: ` : "") + pair.method)));
  const radios = (name, values, text) =>
    make("span", {}, ...values.map((value) =>
      make("label", {}, make("input", { type: "radio", name: `${name}-${unique}`, value, checked: state[name] === value,
        onchange: () => ((state[name] = value), update()) }), text(value))));
  const unique = Math.random().toString(36).slice(2);
  ratio.addEventListener("input", () => ((state.ratio = +ratio.value), update()));
  layers.addEventListener("input", () => ((state.layers = data.layers[+layers.value][1]), update()));
  function toggle(k) {
    const some = new Set(layersOf());
    some.has(k) && some.size > 1 ? some.delete(k) : some.add(k);
    state.layers = [...some].sort((a, b) => a - b).join(",");
    update();
  }
  box.append(
    make("div", { class: "tlx-controls" },
      make("span", {}, "Compare"), make("span", {}, chooser(0), " "), chooser(1),
      make("span", {}, "Ablate the top"), ratio, make("span", {}, ratioText, " ", radios("per", ["layer", "model"], (v) => (v === "layer" ? "of each layer" : "of these layers together"))),
      make("span", {}, "in"), layers, make("span", {}, layerText, " ", ...chips),
      make("span", {}, "by"), radios("ablation", data.ablations, (v) => ({ zero: "zero", mean: "its mean", resample: "a random value" })[v] ?? v),
      make("small", {}, `${data.model}, ${data.names.length - 1} other texts` + (saved ? "; a saved page, without a kernel" : "")),
      make("span", { class: "tlx-busy", role: "status" }, "computing \u2026")),
    error, panels);
  root.replaceChildren(box);

  // What changes
  let running = false, again = false;
  async function update() {
    if (running) return void (again = true); // while Python computes, only the last setting waits
    running = true;
    box.classList.add("busy");
    const name = data.layers.findIndex(([, some]) => some === state.layers);
    if (name >= 0) layers.value = name;
    ratioText.textContent = `${+(100 * data.ratios[state.ratio]).toPrecision(3)} %`;
    layerText.textContent = name >= 0 ? data.layers[name][0] : `layers ${state.layers}`;
    chips.forEach((chip, k) => chip.classList.toggle("on", layersOf().includes(k)));
    try {
      const shown = state.pairs.filter((pair) => pair >= 0);
      const steps = [];
      for (const pair of shown) {
        const per = layersOf().length > 1 ? state.per : "layer";
        steps.push(await get(["step", pair, state.ratio, per, state.layers, state.ablation]));
      }
      if (steps.some((step) => !step)) throw new Error("This setting is not in the saved page.");
      panels.classList.toggle("two", shown.length > 1);
      while (panels.children.length > shown.length) panels.lastChild.remove();
      shown.forEach((pair, side) => {
        if (panels.children[side]?.pair !== pair) {
          const fresh = panel(pair);
          panels.children[side] ? panels.children[side].replaceWith(fresh) : panels.append(fresh);
        }
        panels.children[side].draw(steps[side]);
      });
      error.textContent = "";
      for (const child of panels.children) await child.drawLayers();
    } catch (problem) {
      error.textContent = `${problem.message ?? problem}`;
    }
    running = false;
    if (again) { again = false; return update(); }
    box.classList.remove("busy");
  }

  /** One method on one text. */
  function panel(index) {
    const pair = data.pairs[index], text = data.texts[pair.text];
    const isPrefix = ([, end]) => end <= text.prefix;
    const prefix = text.pieces.filter(isPrefix), suffix = text.pieces.filter((piece) => !isPrefix(piece));
    // of tokens that share a character, the probability of all of them
    const probability = ([start, end], p) => p.slice(Math.max(0, start - text.prefix), end - text.prefix).reduce((all, one) => (all * one) / 1000, 1);
    const name = (layer, neuron) => `L${layer} ${data.units[0][0].toUpperCase()}${neuron}`;
    const part = (name) => make("div", { class: `tlx-${name}` });
    const [numbers, view, bars, curves, tokens, card] = ["numbers", "text", "bars", "curves", "tokens", "cards"].map(part);
    const readout = make("small", {}, `A click shows a ${data.units[0]}.`);
    const best = make("div", {}, ...pair.top.map(([layer, neuron]) =>
      make("button", { class: "tlx-chip best", type: "button", onclick: () => open(layer, neuron), "data-neuron": `${layer}.${neuron}` }, name(layer, neuron))));
    const node = make("div", { class: "tlx-panel", style: `--c:${pair.colour === "#000000" ? "var(--fg)" : pair.colour}` },
      make("b", {}, pair.method), ` on ${text.id || "this text"}`, numbers, view,
      make("div", { class: "tlx-row" }, make("div", {}, make("h4", {}, "Neurons ablated"), bars),
        make("div", {}, make("h4", {}, "Self accuracy without the top of one layer"), curves)),
      make("h4", {}, "Probability that each token loses without the top of one layer"), tokens,
      make("h4", {}, `Scores by layer and ${data.units[0]}`), heatmap(pair, readout, (layer, neuron) => open(layer, neuron)), readout,
      make("h4", {}, `The best ${data.units[1]} (L: layer, ${data.units[0][0].toUpperCase()}: ${data.units[0]})`), best, card);
    node.pair = index;

    const own = pair.text, others = [...data.names.keys()].filter((i) => i !== own);
    const mean = (accuracy) => sum(others.map((i) => accuracy[i])) / others.length;
    node.draw = (step) => {
      const after = data.accuracy.map((before, i) => before + step.accuracy[i]);
      const big = (label, before, after, title) => make("span", { title }, make("small", {}, label), make("b", { class: `tlx-${label.split(" ")[0].toLowerCase()}` }, make("i", {}, `${before} \u2192 `), after));
      numbers.replaceChildren(
        big("Self accuracy", percent(data.accuracy[own]), percent(after[own]), "suffix tokens of this text that are predicted right, from the true tokens before them"),
        ...(others.length ? [big("Neg accuracy", percent(mean(data.accuracy)), percent(mean(after)), "the same on the other texts:\n" + others.map((i) => `${data.names[i]} ${percent(after[i])}`).join("\n"))] : []),
        ...(data.perplexity === false ? [] : [big("Perplexity of general text", data.perplexity, +(data.perplexity + step.perplexity).toFixed(2), "exp of nats per token; lower is better")]),
        make("span", {}, make("small", {}, `${data.units[1]} ablated`), make("b", { class: "tlx-n" }, `${sum(step.layers)}`)));
      const wrong = new Map(step.wrong);
      view.replaceChildren(
        make("span", { class: "tlx-prefix" }, prefix.map(([, , shown]) => shown).join("")), make("b", {}, " | "),
        ...suffix.map((piece) => {
          const [start, , shown] = piece, guess = wrong.get(start);
          const [before, after] = [probability(piece, text.p), probability(piece, step.p)];
          const says = guess == null ? "" : `; predicted instead: ${JSON.stringify(guess)}`;
          return make("span", { class: guess == null ? "tlx-token" : "tlx-token wrong", title: `${JSON.stringify(shown)}: probability ${percent(before)} \u2192 ${percent(after)}${says}` },
            make("em", {}, guess == null ? "" : visible(guess).trim() || "\u2423"),
            make("span", { style: `background:${change(before - after)}` }, visible(shown)),
            make("i", { style: bar(before) }), make("i", { style: bar(after) }));
        }),
        make("div", { class: "tlx-note" }, "Bars: probability of the true token, grey before and coloured after. White on dark: no longer predicted; above it the token predicted instead."));
      const most = Math.max(1, ...step.layers);
      bars.replaceChildren(svg("svg", { viewBox: `0 0 230 ${nLayers * 14 + 2}`, role: "img" }, ...step.layers.flatMap((n, k) => [
        svg("text", { x: 46, y: k * 14 + 11, "text-anchor": "end" }, `layer ${k}`),
        svg("rect", { x: 52, y: k * 14 + 2, width: (140 * n) / most, height: 10, style: "fill:var(--c)" }),
        svg("text", { x: 56 + (140 * n) / most, y: k * 14 + 11 }, `${n}`)])));
    };

    node.drawLayers = async () => {
      const found = [];
      for (let k = 0; k < nLayers; k++) {
        found.push(await get(["layer", index, k, state.ablation]));
        if (again) return;
      }
      curves.replaceChildren(chart(found.map((one) => one.self)));
      const width = 520 / suffix.length;
      const cells = found.flatMap((one, k) => suffix.map((piece, i) => {
        const [before, after] = [probability(piece, text.p), probability(piece, one.p[state.ratio])];
        const cell = svg("rect", { x: 46 + i * width, y: k * 12, width: width - 0.5, height: 11.5, style: `fill:${change(before - after)};stroke:var(--line)`, "stroke-width": 0.3 });
        return titled(cell, `layer ${k}, ${JSON.stringify(piece[2])}: ${percent(before)} \u2192 ${percent(after)}`);
      }));
      tokens.replaceChildren(svg("svg", { viewBox: `0 0 570 ${nLayers * 12 + 12}`, role: "img" },
        ...found.map((_, k) => svg("text", { x: 42, y: k * 12 + 10, "text-anchor": "end" }, `layer ${k}`)), ...cells,
        svg("text", { x: 46, y: nLayers * 12 + 11 }, "first token of the suffix \u2192"),
        svg("text", { x: 566, y: nLayers * 12 + 11, "text-anchor": "end" }, "orange: lost, blue: gained")));
    };

    /** Accuracy over the ratios, one line per layer, named at its end. */
    function chart(lines) {
      const x = (i) => 40 + (260 * i) / Math.max(1, data.ratios.length - 1);
      const low = Math.max(0, Math.floor(10 * Math.min(...lines.flat()) - 1) / 10);
      const y = (v) => 10 + (110 * (1 - v)) / (1 - low);
      const ends = lines.map((line, k) => ({ k, at: y(line[line.length - 1]) })).sort((a, b) => a.at - b.at);
      ends.forEach((end, i) => (end.at = Math.max(end.at, i ? ends[i - 1].at + 11 : 0)));
      const drawn = lines.flatMap((line, k) => {
        const colour = layerColour(k, nLayers);
        return [svg("polyline", { points: line.map((v, i) => `${x(i)},${y(v)}`).join(" "), fill: "none", stroke: colour, "stroke-width": 1.6 }),
          ...line.map((v, i) => titled(svg("circle", { cx: x(i), cy: y(v), r: 3, fill: colour }), `layer ${k}, top ${+(100 * data.ratios[i]).toPrecision(3)} %: accuracy ${percent(v)}`))];
      });
      const ticks = [low, (1 + low) / 2, 1].flatMap((v) => [svg("line", { x1: 40, x2: 300, y1: y(v), y2: y(v), style: "stroke:var(--grid)" }), svg("text", { x: 36, y: y(v) + 4, "text-anchor": "end" }, percent(v))]);
      const shares = data.ratios.map((r, i) => svg("text", { x: x(i), y: 136, "text-anchor": "middle" }, `${+(100 * r).toPrecision(2)}`));
      return svg("svg", { viewBox: `0 0 350 ${Math.max(150, ends[ends.length - 1].at + 8)}`, role: "img" }, ...ticks,
        svg("line", { x1: x(state.ratio), x2: x(state.ratio), y1: 8, y2: 122, stroke: "#888", "stroke-dasharray": "3 3" }), ...drawn, ...shares,
        svg("text", { x: 170, y: 149, "text-anchor": "middle" }, "top share of the layer (%)"),
        ...ends.map(({ k, at }) => svg("text", { x: 306, y: at + 4, style: `fill:${layerColour(k, nLayers)}` }, `layer ${k}`)));
    }

    /** A neuron's card. */
    async function open(layer, neuron) {
      const found = await get(["card", index, layer, neuron]);
      best.querySelectorAll("button").forEach((chip) => chip.classList.toggle("on", chip.dataset.neuron === `${layer}.${neuron}`));
      if (!found) return card.replaceChildren(make("div", { class: "tlx-card" }, `A saved page holds the cards of the best ${data.units[1]} only; explore() in a notebook shows all.`));
      const isNeuron = data.units[0] === "neuron";
      const strongest = Math.max(1e-9, ...found.fires.map(Math.abs));
      const high = found.elsewhere.filter(([, rank]) => rank <= HIGH * nLayers * nNeurons).sort((a, b) => a[1] - b[1]);
      const words = (list) => list.map(([token, x]) => make("code", { title: `logit ${x}` }, visible(token)));
      card.replaceChildren(make("div", { class: "tlx-card" },
        make("b", {}, `${data.units[0][0].toUpperCase()}${data.units[0].slice(1)} ${neuron} of layer ${layer}`),
        make("h4", {}, `Where it fires in the text (orange: positive, blue: negative; strongest ${+strongest.toPrecision(3)})`),
        make("div", { class: "tlx-fires" }, ...text.pieces.map(([start, end, shown]) => {
          const fires = found.fires.slice(start, end).sort((a, b) => Math.abs(b) - Math.abs(a));
          return make("span", { style: `background:${change(fires[0] / strongest)}`, title: `activation ${fires.join(", ")}` }, visible(shown));
        })),
        make("h4", {}, isNeuron ? "Tokens it promotes when it is positive (W_out row times unembedding)" : "Tokens that its mean output in this text promotes"), ...words(found.promoted),
        make("h4", {}, "Tokens it suppresses"), ...words(found.suppressed),
        make("h4", {}, "Its rank"), make("table", {}, make("tr", {}, ...["method", "in the model", "in its layer"].map((head) => make("th", {}, head))),
          ...found.ranks.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, `${cell}`))))),
        make("h4", {}, `Other texts in which it ranks in the top ${100 * HIGH} % (by Attribution, of ${found.elsewhere.length})`),
        high.length ? make("span", {}, high.map(([id, rank]) => `${id} (rank ${rank})`).join(", ")) : make("small", {}, "none")));
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
      readout.textContent = `layer ${layer} (top row is 0), ${data.units[0]} ${neuron}: ${Math.round((100 * bytes[layer * nNeurons + neuron]) / 255)} % of the way from its layer's lowest to its highest score. A click shows it.`;
    });
    canvas.addEventListener("click", (event) => open(...at(event)));
    return canvas;
  }

  update();
}

/** anywidget: the same view, whose requests Python answers. */
function render({ model, el }) {
  const waiting = new Map();
  let last = 0;
  const onMessage = (message) => {
    const { resolve, reject } = waiting.get(message.id) ?? {};
    waiting.delete(message.id);
    message.error ? reject?.(new Error(message.error)) : resolve?.(message.answer);
  };
  model.on("msg:custom", onMessage);
  const ask = (request) => new Promise((resolve, reject) => {
    waiting.set(++last, { resolve, reject });
    model.send({ id: last, request });
  });
  mount(el, model.get("data"), ask);
  return () => model.off("msg:custom", onMessage);
}
export default { render };

// A text of a run, head by head. Plain canvas; nothing is loaded.
//
// 1. unpack(data): the packed arrays as numbers, and what is asked of them.
// 2. Ctx and Svg: panels are drawn once, on a canvas or as SVG.
// 3. render({ model, el }): the controls, the panels and the readout, in the form of anywidget.

const MISSING = NaN;
const PARTS = { bos: "BOS", prefix: "prefix", prompt: "prompt", generated: "text" };

// --- numbers

async function inflated(base64) {
  const raw = Uint8Array.from(atob(base64), character => character.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function arraysOf(index, bytes) {
  const arrays = {};
  let at = 0;
  for (const [name, { type, length }] of Object.entries(index)) {
    if (type === "uint8") arrays[name] = bytes.subarray(at, at + length);
    if (type === "uint16") {
      const low = bytes.subarray(at, at + length), high = bytes.subarray(at + length, at + 2 * length);
      arrays[name] = Uint16Array.from(low, (value, i) => value + 256 * high[i]);
    }
    if (type === "float32") {
      const view = new DataView(bytes.buffer, bytes.byteOffset + at, 4 * length);
      arrays[name] = Float32Array.from({ length }, (_, i) => view.getFloat32(4 * i, true));
    }
    at += length * { uint8: 1, uint16: 2, float32: 4 }[type];
  }
  return arrays;
}

/** The numbers of a view; a head is layer * heads + head, or "mean". */
export async function unpack(data) {
  const arrays = arraysOf(data.arrays, await inflated(data.packed));
  const n = data.layers * data.heads, first = data.parts.length, top = 2 ** data.bits - 1;
  const values = Float64Array.from({ length: top + 1 }, (_, code) =>
    code ? data.floor ** (1 - (code - 1) / (top - 1)) : 0);
  const means = data.arms.map(arm => new Array(arm.steps));

  function row(arm, step, head) {
    const codes = arrays[`pattern${arm}`], width = first + step;
    const start = n * (step * first + step * (step - 1) / 2);
    if (head !== "mean") {
      return Float64Array.from(codes.subarray(start + head * width, start + (head + 1) * width), code => values[code]);
    }
    if (!means[arm][step]) {
      const sums = new Float64Array(width);
      for (let i = 0; i < n * width; i++) sums[i % width] += values[codes[start + i]];
      means[arm][step] = sums.map(sum => sum / n);
    }
    return means[arm][step];
  }

  function mass(arm, name, step, head) {
    const stored = arrays[`masses${arm}`], { steps } = data.arms[arm];
    const start = (data.masses.indexOf(name) * steps + step) * n;
    if (head !== "mean") return stored[start + head];
    return stored.subarray(start, start + n).reduce((sum, value) => sum + value, 0) / n;
  }

  function odds(arm, step, head) {
    const on = mass(arm, data.steered, step, head);
    const off = data.masses.filter(name => name !== data.steered)
      .reduce((sum, name) => sum + mass(arm, name, step, head), 0);
    return on > 0 && off > 0 ? Math.log(on / off) : MISSING;
  }

  /** How far the difference of two numbers of rows may be from that of the attention. */
  const unsure = (a, b) => data.precision * (a + b);

  return { n, first, row, mass, odds, unsure };
}

// --- drawing

const RAMPS = {
  light: [[255, 255, 255], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 48, 107]],
  dark: [[22, 26, 32], [20, 62, 104], [31, 111, 171], [98, 176, 227], [226, 243, 255]],
};
const SPLITS = {
  light: [[33, 102, 172], [146, 197, 222], [255, 255, 255], [244, 165, 130], [178, 24, 43]],
  dark: [[120, 190, 255], [38, 92, 150], [22, 26, 32], [150, 66, 40], [255, 160, 120]],
};
const STRIPS = { bos: "#8b949e", prefix: "#d55e00", prompt: "#0072b2", generated: "#009e73" };

const mixed = (stops, t) => {
  const position = Math.min(Math.max(t, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(position), stops.length - 2);
  return stops[i].map((value, c) => Math.round(value + (stops[i + 1][c] - value) * (position - i)));
};
const css = colour => `rgb(${colour.join(",")})`;
const inkOn = ([r, g, b]) => 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#1f2328" : "#ffffff";

/** A scale from numbers to colours: from 0 to max, from -max to max (`split`), or from min to max. */
function scaleOf(max, split, log, theme, min = 0) {
  const least = max * 1e-3, bent = Boolean(log) && min === 0;
  const position = size => bent
    ? Math.log1p(size / least) / Math.log1p(max / least)
    : (size - min) / (max - min);
  const colour = value => {
    if (!(max > min)) return mixed(split ? SPLITS[theme] : RAMPS[theme], split ? 0.5 : 0);
    if (!split) return mixed(RAMPS[theme], position(value));
    return mixed(SPLITS[theme], 0.5 + 0.5 * Math.sign(value) * Math.min(position(Math.abs(value)), 1));
  };
  return { min: split ? -max : min, max, split, log: bent, colour };
}

/** What panels draw with, as SVG text. */
class Svg {
  constructor(width, height) {
    this.size = [width, height];
    this.parts = [];
    this.fillStyle = this.strokeStyle = "#000";
    this.font = "11px sans-serif";
    this.textAlign = "left";
  }
  fillRect(x, y, w, h) {
    this.parts.push(`<rect x="${x}" y="${y}" width="${w}" height="${h}" fill="${this.fillStyle}"/>`);
  }
  strokeRect(x, y, w, h) {
    this.parts.push(`<rect x="${x}" y="${y}" width="${w}" height="${h}" fill="none" stroke="${this.strokeStyle}"/>`);
  }
  fillText(text, x, y) {
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    const plain = text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd")
      .replace(/[&<>"]/g, mark => `&#${mark.charCodeAt(0)};`);
    const size = parseFloat(this.font.match(/([\d.]+)px/)[1]);
    const weight = this.font.startsWith("600") ? ' font-weight="600"' : "";
    this.parts.push(`<text x="${x}" y="${y}" fill="${this.fillStyle}" font-family="sans-serif" font-size="${size}"${weight} text-anchor="${anchor}" xml:space="preserve">${plain}</text>`);
  }
  toString() {
    const [w, h] = this.size;
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${w}" height="${h}" viewBox="0 0 ${w} ${h}">${this.parts.join("")}</svg>\n`;
  }
}

const SPACE = { left: 30, right: 4, top: 8, bottom: 18 };

/** Where the cells of a panel lie in a figure of this size. */
function boxOf(panel, width, height) {
  const w = width - SPACE.left - SPACE.right, h = height - SPACE.top - SPACE.bottom;
  const x = c => SPACE.left + Math.round(c * w / panel.cols), y = r => SPACE.top + Math.round(r * h / panel.rows);
  return {
    x, y,
    at: (left, top) => {
      const c = Math.floor((left - SPACE.left) / w * panel.cols), r = Math.floor((top - SPACE.top) / h * panel.rows);
      return c >= 0 && r >= 0 && c < panel.cols && r < panel.rows ? [r, c] : null;
    },
  };
}

const every = (n, room) => [1, 2, 5, 10, 20, 50, 100, 200, 500].find(step => n / step * 24 <= room) ?? n;

function drawPanel(ctx, panel, width, height, look, left = 0, top = 0) {
  const box = boxOf(panel, width, height);
  ctx.fillStyle = look.hole;
  ctx.fillRect(left + box.x(0), top + box.y(0), box.x(panel.cols) - box.x(0), box.y(panel.rows) - box.y(0));
  const largest = new Map();  // where cells are more than pixels, a pixel shows the largest of its cells
  for (let r = 0; r < panel.rows; r++) {
    for (let c = 0; c < panel.cols; c++) {
      const value = panel.value(r, c), pixel = box.y(r) * width + box.x(c), known = largest.get(pixel);
      if (Number.isNaN(value) || known && Math.abs(known.value) >= Math.abs(value)) continue;
      largest.set(pixel, { value, r, c });
    }
  }
  for (const { value, r, c } of largest.values()) {
    ctx.fillStyle = css(panel.scale.colour(value));
    ctx.fillRect(left + box.x(c), top + box.y(r), Math.max(1, box.x(c + 1) - box.x(c)), Math.max(1, box.y(r + 1) - box.y(r)));
  }
  for (const [c, stop, colour] of panel.strips) {
    ctx.fillStyle = colour;
    ctx.fillRect(left + box.x(c), top + 1, Math.max(1, box.x(stop) - box.x(c) - 1), 5);
  }
  ctx.font = "10px sans-serif";
  ctx.fillStyle = look.pale;
  ctx.textAlign = "right";
  const gap = every(panel.rows, height);
  for (let r = 0; r < panel.rows; r += gap) ctx.fillText(String(r), left + SPACE.left - 4, top + (box.y(r) + box.y(r + 1)) / 2 + 3.5);
  ctx.textAlign = "center";
  const step = every(panel.cols, width);
  for (let c = 0; c < panel.cols; c += step) ctx.fillText(panel.column(c), left + (box.x(c) + box.x(c + 1)) / 2, top + height - 5);
  for (const [r, c, colour] of panel.marks) {
    ctx.strokeStyle = colour;
    const [r0, r1] = r === null ? [0, panel.rows] : [r, r + 1], [c0, c1] = c === null ? [0, panel.cols] : [c, c + 1];
    ctx.strokeRect(left + box.x(c0) + 0.5, top + box.y(r0) + 0.5, Math.max(1, box.x(c1) - box.x(c0) - 1), Math.max(1, box.y(r1) - box.y(r0) - 1));
  }
}

// --- words

const shown = (value, sign = false) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "none";
  const size = Math.abs(value);
  const text = size === 0 ? "0" : size < 1e-3 || size >= 1e5 ? value.toExponential(3) : value.toPrecision(4);
  return sign && value > 0 ? `+${text}` : text;
};
const within = interval => interval.low === null || interval.low === undefined || Number.isNaN(interval.low)
  ? "" : ` [${shown(interval.low)}, ${shown(interval.high)}]`;
/** Model text in a line of ours: in isolation, and with marks that would turn the line around made visible. */
const quoted = text => `“\u2068${text.replace(/\n/g, "↵").replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
  mark => `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`)}\u2069”`;
const csvCell = value => {
  if (typeof value === "number") return Number.isNaN(value) ? "" : String(value);
  // What a spreadsheet may run as a formula stands behind an apostrophe, as in scoring/human.py.
  const text = /^'*([ \t\r\n]*[=+\-@＝＋－＠]|[\t\r\n])/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
};
const csvText = rows => rows.map(row => row.map(csvCell).join(",")).join("\r\n") + "\r\n";

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.startsWith("aria")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// --- the viewer

/**
 * Shows a view in an element.
 *
 * @param model A model of anywidget, or a plain object with get, set, save_changes, on and off. It has "data" (`View.data`), the
 *   chosen "head" as [layer, head] or null for the mean, and the chosen "token".
 * @param el Where to. Its data-* attributes hold the current readout.
 * @returns A function that lets go of what was listened to.
 */
export async function render({ model, el }) {
  const data = model.get("data"), root = make("div", { className: "lapa2-view" });
  el.append(root);
  if (typeof DecompressionStream === "undefined") {
    root.append("This browser cannot unpack the page's numbers; use one of 2023 or later.");
    return () => {};
  }
  const numbers = await unpack(data), { n, first } = numbers, arms = data.arms, two = arms.length === 2;
  const steps = Math.max(...arms.map(arm => arm.steps)), keys = first + steps - 1;
  const both = Math.min(...arms.map(arm => arm.steps));  // attention falls with the step: means are over the same ones
  const metrics = Object.keys(arms[0].control);
  const headNames = Array.from({ length: n }, (_, head) => `${Math.floor(head / data.heads)}.${head % data.heads}`);
  const headName = head => headNames[head] ?? "mean", headOf = name => headNames.includes(name) ? headNames.indexOf(name) : "mean";
  const partOf = key => key < first ? data.parts[key] : "generated";
  /** A number (or row) of every arm at a step; MISSING where the arm's text has ended. */
  const atStep = (step, read) => arms.map((arm, i) => step < arm.steps ? read(i) : MISSING);

  const colours = { mass: `attention on the ${data.steered}`, read: "attention of the step's query" };
  const hasBos = data.masses.includes("bos"); // else the text starts with nothing
  if (hasBos) colours.bos = "attention on BOS";
  for (const metric of metrics) colours[metric] = `control (${metric}, nats)`;
  colours.none = "nothing";
  const grids = {
    mass: `attention on the ${data.steered}, this step`,
    text: `attention on the ${data.steered}, mean over ${both === steps ? "this text" : `steps 0-${both - 1}, which both texts have`}`,
    odds: `log-odds of the ${data.steered}, this step`,
  };
  if (arms[0].run.mean) grids.run = `attention on the ${data.steered}, all texts of the run, steps 0-${data.runSteps - 1}`;
  for (const [name, values] of Object.entries(data.study)) grids[name] = `${values.about} (${values.measure})`;

  const chosen = () => ({ step: model.get("token"), head: model.get("head")?.join(".") ?? "mean" });
  const state = { step: 0, head: "mean", key: 0, colour: "mass", grid: "mass", scale: "shared", log: "", bos: "auto" };
  /** BOS has most of the attention and would take the whole scale of the mean over heads, which so begins without it. */
  const withoutBos = () => state.bos === "auto" ? hasBos && state.head === "mean" : state.bos === "1";
  let hover = null;

  const upTo = stop => Array.from({ length: stop }, (_, i) => String(i));
  const allowed = {
    step: upTo(steps), key: upTo(keys), head: ["mean", ...headNames], colour: Object.keys(colours), grid: Object.keys(grids),
    scale: ["shared", "own"], log: ["", "1"], bos: ["", "1"],
  };
  /** Takes values that are allowed, and leaves the others as they are. */
  function take(wanted) {
    for (const [name, value] of Object.entries(wanted)) {
      if (allowed[name]?.includes(String(value))) state[name] = typeof state[name] === "number" ? +value : String(value);
    }
    state.key = Math.min(state.key, first + state.step - 1);
  }

  const set = wanted => {
    take(wanted);
    hover = null;
    show();
    model.set("head", state.head === "mean" ? null : state.head.split(".").map(Number));
    model.set("token", state.step);
    model.save_changes();
  };

  // --- panels

  const theme = () => matchMedia("screen and (prefers-color-scheme: dark)").matches ? "dark" : "light";
  const lookOf = () => {
    const style = getComputedStyle(root), read = name => style.getPropertyValue(name).trim();
    return { ink: read("--ink"), pale: read("--pale"), hole: read("--hole"), page: read("--page"), mark: read("--mark") };
  };
  /** b - a, or 0 where it is not more than the numbers' rounding. */
  const resolved = (a, b) => Math.abs(b - a) <= numbers.unsure(a, b) ? 0 : b - a;
  const masked = key => withoutBos() && partOf(key) === "bos";

  /** The ends of a panel's values; 0 is one of them unless the values have another lower end. */
  function endsOf(panel) {
    let low = panel.open ? Infinity : 0, high = panel.open ? -Infinity : 0;
    for (let r = 0; r < panel.rows; r++) {
      for (let c = 0; c < panel.cols; c++) {
        const value = panel.value(r, c), size = panel.open ? value : Math.abs(value);
        if (!Number.isNaN(size)) [low, high] = [Math.min(low, size), Math.max(high, size)];
      }
    }
    return [low, high];
  }
  function scaled(panels, log) {
    const all = panels.filter(panel => !panel.apart).map(endsOf);
    const shared = [Math.min(...all.map(ends => ends[0])), Math.max(...all.map(ends => ends[1]))];
    for (const panel of panels) {
      const [low, high] = panel.apart || state.scale === "own" ? endsOf(panel) : shared;
      panel.scale = low > high ? scaleOf(MISSING, false, log, theme(), MISSING) : scaleOf(high, panel.split, log, theme(), low);
    }
    return panels;
  }

  const otherTexts = two && !data.same
    ? "The two texts differ. So this is not a difference of the same tokens: after the prompt it compares places." : "";

  function mapsOf(head) {
    const strips = [];
    for (let key = 0; key < keys; key++) {
      const last = strips[strips.length - 1];
      if (last && last[3] === partOf(key)) last[1] = key + 1;
      else strips.push([key, key + 1, STRIPS[partOf(key)], partOf(key)]);
    }
    const of = headOf(head), rows = arms.map((arm, i) => Array.from({ length: arm.steps }, (_, step) => numbers.row(i, step, of)));
    const cell = i => (step, key) => masked(key) ? MISSING : rows[i][step]?.[key] ?? MISSING;
    const panels = arms.map((arm, i) => ({ title: arm.name, value: cell(i), split: false }));
    if (two) panels.push({ title: "difference", note: otherTexts, apart: true, value: (step, key) => resolved(cell(0)(step, key), cell(1)(step, key)), split: true });
    for (const panel of panels) {
      Object.assign(panel, { rows: steps, cols: keys, strips, column: String, head, kind: "map" });
    }
    return scaled(panels, state.log);
  }

  function valuesOf(name) {
    const grid = table => ({ mean: table.mean.flat(), low: table.low.flat(), high: table.high.flat() });
    const heads = read => ({ mean: Array.from({ length: n }, (_, head) => read(head)) });
    if (data.study[name]) return [{ title: data.study[name].about, split: true, ...grid(data.study[name]) }];
    if (name === "run") {
      const panels = arms.filter(arm => arm.run.mean).map(arm => ({ title: arm.name, split: false, ...grid(arm.run) }));
      if (data.differences.mean) panels.push({ title: "difference", apart: true, split: true, ...grid(data.differences) });
      return panels;
    }
    const read = {
      mass: (i, head) => state.step < arms[i].steps ? numbers.mass(i, data.steered, state.step, head) : MISSING,
      odds: (i, head) => state.step < arms[i].steps ? numbers.odds(i, state.step, head) : MISSING,
      text: (i, head) => {
        let sum = 0;
        for (let step = 0; step < both; step++) sum += numbers.mass(i, data.steered, step, head);
        return sum / both;
      },
    }[name];
    const panels = arms.map((arm, i) => ({ title: arm.name, split: false, open: name === "odds", ...heads(head => read(i, head)) }));
    if (two) panels.push({ title: "difference", note: otherTexts, apart: true, split: true, mean: panels[1].mean.map((value, head) => value - panels[0].mean[head]) });
    return panels;
  }

  function gridsOf() {
    return scaled(valuesOf(state.grid).map(values => ({
      ...values, rows: data.layers, cols: data.heads, strips: [], kind: "grid", column: String,
      value: (layer, c) => values.mean[layer * data.heads + c] ?? MISSING,
    })), state.log);
  }

  function columnsOf() {
    const columns = {};
    for (const name of Object.keys(grids)) {
      valuesOf(name).forEach((panel, i) => { columns[name + i] = { ...panel, name, title: data.study[name] ? grids[name] : `${{ mass: "attention", text: "mean over steps", odds: "log-odds", run: "all texts" }[name]}, ${panel.title}` }; });
    }
    return columns;
  }

  // --- elements

  const choice = (name, label, options) => make("label", {}, label,
    make("select", { name, onchange: event => set({ [name]: event.target.value }) },
      ...Object.entries(options).map(([value, text]) => make("option", { value }, text))));
  const tick = (name, label) => make("label", { className: "tick" },
    make("input", { type: "checkbox", name, onchange: event => set({ [name]: event.target.checked ? "1" : "" }) }), label);
  const button = (text, label, click) => make("button", { type: "button", "aria-label": label, onclick: click }, text);

  const slider = make("input", { type: "range", name: "step", min: 0, max: steps - 1, step: 1, oninput: event => set({ step: event.target.value }) });
  const headChoice = choice("head", "Head", Object.fromEntries(allowed.head.map(name => [name, name === "mean" ? "mean of all heads" : name])));
  const stepName = make("output", {});
  const controls = make("form", { className: "controls", "aria-label": "What is shown", onsubmit: event => event.preventDefault() },
    make("div", { className: "stepper" },
      button("‹", "One step back", () => set({ step: state.step - 1 })),
      make("label", {}, "Step", slider), stepName,
      button("›", "One step on", () => set({ step: state.step + 1 }))),
    headChoice,
    choice("scale", "Colour scale", { shared: "shared by the arms", own: "each its own" }),
    tick("log", "log scale"), hasBos ? tick("bos", "without BOS") : "");

  /** A bar of a scale's colours between its ends. */
  function keyOf(scale) {
    const stops = (scale.split ? SPLITS : RAMPS)[theme()].map(css).join(",");
    return make("span", { className: "key" }, make("span", { className: "least" }, shown(scale.min)),
      make("i", { className: "bar", style: `background: linear-gradient(90deg, ${stops})` }), make("span", { className: "most" }, shown(scale.max)));
  }
  const exports = (panel, name) => make("span", { className: "exports", role: "group", "aria-label": `Save ${name}` },
    ...["SVG", "CSV"].map(kind => button(kind, `Save ${name} as ${kind}`, () => save(panel, kind))));
  const section = (panel, title, ...children) => make("section", { className: panel, "aria-label": title },
    make("header", {}, make("h2", {}, title), ...(panel ? [exports(panel, `the ${title.toLowerCase()}`)] : [])), ...children);

  const texts = make("div", { className: "arms" });
  const maps = make("div", { className: "figures" }), mapTitle = make("h3", {});
  const heads = make("div", { className: "figures" });
  const rowTable = make("details", { ontoggle: () => show() }, make("summary", {}, "This step as a table"));
  const headTable = make("details", { ontoggle: () => show() }, make("summary", {}, "Heads as a table"));
  const readout = make("p", { className: "readout", role: "status", "aria-live": "polite" });
  const about = make("details", { className: "about" }, make("summary", {}, "What this is"));

  root.append(
    make("header", {}, make("h1", {}, data.title)), controls,
    section("text", "Text", choice("colour", "Coloured by", colours), texts),
    section("map", "Attention of steps on keys", make("p", { className: "legend" },
      ...Object.entries(PARTS).filter(([name]) => name !== "bos" || hasBos).map(([name, word]) => make("span", {}, make("i", { style: `background:${STRIPS[name]}` }), word)),
      "Rows are steps, columns are keys. Arrow keys move."), mapTitle, maps, rowTable),
    section("grid", "Layers and heads", make("div", { className: "controls" }, choice("grid", "Value", grids)),
      make("p", { className: "legend" }, "Rows are layers, columns are heads. Arrow keys or a click choose a head, Escape the mean of all."), heads, headTable),
    about, readout);

  // --- what the page says about itself

  const facts = { ...data.facts };
  arms.forEach(arm => { facts[arm.name] = `augmentation ${arm.rule}; ${arm.steps} tokens shown${arm.end && `, the text ended by: ${arm.end}`}`; });
  about.append(make("dl", {}, ...Object.entries(facts).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
  const notes = [
    `Attention on single keys was read again with the run's model, under the arm's augmentation at the same steps. It is stored in ${2 ** data.bits - 1} steps of a log scale from ${data.floor.toExponential(1)} to 1, so a number is right to ${(100 * data.precision).toPrecision(2)} % of itself; less is shown as 0. A difference of two such numbers is uncertain by this part of their sum, and is drawn as 0 where it is not larger. Attention on whole parts is stored as float32.`,
    ...arms.map(arm => arm.off === null ? `${arm.name}: the run recorded no attention of this text to compare with.`
      : `${arm.name}: the largest difference from the attention that the run recorded is ${arm.off.toExponential(1)}.`),
    data.same ? "The arms have the same text." : "Each arm has a text of its own. So at keys of the text a difference compares places, and not words. `lapa2 view --same-text` reads one text in both arms.",
    data.noControl ? `There is no control by step: ${data.noControl}.` : `Control (${metrics.join(", ")}) is read on the shown text, behind the task's opposite prefixes, with the arm's augmentation in every branch.`,
    "One text has no interval. Intervals of all texts of the run, of effects and of writes are 95 %, over prompts.",
  ];
  about.append(...notes.map(note => make("p", {}, note)));

  // --- figures on the page

  /**
   * The pointer and the keys on an element.
   *
   * @param under What stands under the pointer of an event, or null.
   * @param choose What a click on it chooses.
   * @param move Where a key leads, or undefined.
   */
  function listen(element, under, choose, move) {
    const point = target => { hover = target; tell(); };
    element.addEventListener("pointermove", event => point(under(event)));
    element.addEventListener("pointerleave", () => point(null));
    element.addEventListener("click", event => { if (under(event)) set(choose(under(event))); });
    element.addEventListener("keydown", event => {
      const to = event.ctrlKey || event.altKey || event.metaKey ? undefined : move(event.key);
      if (!to) return;
      event.preventDefault();
      set(to);
    });
  }
  const drawn = new Map();
  function figuresIn(holder, panels, aspect) {
    while (holder.children.length > panels.length) holder.lastChild.remove();
    while (holder.children.length < panels.length) holder.append(newFigure());
    panels.forEach((panel, i) => {
      const figure = holder.children[i], canvas = figure.querySelector("canvas"), width = Math.max(120, Math.floor(figure.clientWidth));
      const height = Math.round(aspect(width)), dense = Math.min(devicePixelRatio || 1, 3), look = lookOf();
      canvas.width = width * dense;
      canvas.height = height * dense;
      canvas.style.height = `${height}px`;
      canvas.setAttribute("aria-label", panel.kind === "map"
        ? `Attention of head ${panel.head}, ${panel.title}: ${panel.rows} steps by ${panel.cols} keys. Arrow keys move the cursor.`
        : `${grids[state.grid]}, ${panel.title}: ${panel.rows} layers by ${panel.cols} heads. Arrow keys choose a head.`);
      const ctx = canvas.getContext("2d");
      ctx.setTransform(dense, 0, 0, dense, 0, 0);
      drawPanel(ctx, marked(panel, look), width, height, look);
      figure.querySelector("figcaption").replaceChildren(
        ...(panel.note ? [make("span", { className: "apart" }, panel.note)] : []), make("b", {}, panel.title), keyOf(panel.scale));
      drawn.set(canvas, { panel, box: boxOf(panel, width, height) });
    });
  }
  function marked(panel, look) {
    const head = headOf(state.head), marks = [];
    if (panel.kind === "map") marks.push([state.step, null, look.mark], [state.step, state.key, look.ink]);
    else if (head !== "mean") marks.push([Math.floor(head / data.heads), head % data.heads, look.mark]);
    return { ...panel, marks };
  }
  function newFigure() {
    const canvas = make("canvas", { tabIndex: 0, role: "application" });
    const under = event => {
      const { panel, box } = drawn.get(canvas), edge = canvas.getBoundingClientRect();
      const cell = box.at(event.clientX - edge.left, event.clientY - edge.top);
      return cell && hovered(panel, cell);
    };
    const move = pressed => drawn.get(canvas).panel.kind === "map" ? movedInMap(pressed) : movedInGrid(pressed);
    listen(canvas, under, ({ step, key, head }) => drawn.get(canvas).panel.kind === "map" ? { step, key } : { head }, move);
    return make("figure", {}, make("figcaption"), canvas);
  }
  const hovered = (panel, [r, c]) => panel.kind === "grid" ? { head: headName(r * data.heads + c) }
    : c < first + r ? { step: r, key: c, head: panel.head } : null;
  function movedInMap(pressed) {
    const { step, key } = state, last = first + step - 1;
    const moves = {
      ArrowLeft: { key: key - 1 }, ArrowRight: { key: key + 1 }, ArrowUp: { step: step - 1 }, ArrowDown: { step: step + 1 },
      PageUp: { step: Math.max(0, step - 10) }, PageDown: { step: Math.min(steps - 1, step + 10) },
      Home: { key: 0 }, End: { key: last },
    };
    return moves[pressed];
  }
  function movedInGrid(pressed) {
    const now = headOf(state.head), layer = Math.floor(now / data.heads), column = now % data.heads;
    const inside = (value, size) => Math.min(Math.max(value, 0), size - 1);
    const to = (l, c) => ({ head: headName(now === "mean" ? 0 : inside(l, data.layers) * data.heads + inside(c, data.heads)) });
    const moves = {
      ArrowLeft: to(layer, column - 1), ArrowRight: to(layer, column + 1), ArrowUp: to(layer - 1, column), ArrowDown: to(layer + 1, column),
      Home: to(layer, 0), End: to(layer, data.heads - 1), Escape: { head: "mean" },
    };
    return moves[pressed];
  }

  // --- the text

  const nothing = key => key.text === "" ? "·" : key.text.replace(/\n/g, "↵");
  function wordsOf(i) {
    const arm = arms[i], head = headOf(state.head);
    return arm.keys.map((text, key) => {
      const step = key - first;
      let value = MISSING;
      if (state.colour === "read") value = state.step < arm.steps && key < first + state.step ? numbers.row(i, state.step, head)[key] : MISSING;
      else if (step >= 0 && state.colour !== "none") {
        value = state.colour === "mass" ? numbers.mass(i, data.steered, step, head) : state.colour === "bos" ? numbers.mass(i, "bos", step, head)
          : arm.control[state.colour]?.[step] ?? MISSING;
      }
      if (state.colour === "read" && masked(key)) value = MISSING;
      return { text, key, step, value, part: partOf(key) };
    });
  }
  function textScales(words) {
    const most = words.map(list => Math.max(0, ...list.map(word => Math.abs(word.value) || 0)));
    const split = metrics.includes(state.colour) && words.flat().some(word => word.value < 0);
    return most.map(own => scaleOf(state.scale === "own" ? own : Math.max(...most), split, state.log, theme()));
  }
  function showTexts() {
    const words = arms.map((arm, i) => wordsOf(i)), scales = textScales(words), focused = root.ownerDocument.activeElement;
    const inside = texts.contains(focused) ? [focused.closest(".arm").dataset.arm, focused.dataset.key] : null;
    texts.replaceChildren(...arms.map((arm, i) => {
      const at = first + Math.min(state.step, arm.steps - 1);
      const line = make("div", { className: "line", role: "group", "aria-label": `Tokens of ${arm.name}; arrow keys move the step` }, ...words[i].map(word => {
        const token = make("button", { type: "button", className: `token ${word.part}`, tabIndex: word.key === at ? 0 : -1 }, nothing(word));
        token.dataset.key = word.key;
        if (!Number.isNaN(word.value)) {
          const colour = scales[i].colour(word.value);
          token.style.background = css(colour);
          token.style.color = inkOn(colour);
        }
        if (word.key === at && state.step < arm.steps) token.setAttribute("aria-current", "step");
        token.setAttribute("aria-label", `${quoted(word.text)}, ${word.step >= 0 ? `step ${word.step}` : PARTS[word.part]}: ${shown(word.value)}`);
        return word.text.includes("\n") ? [token, make("br")] : [token];
      }).flat());
      const column = make("div", { className: "arm" }, make("h3", {}, arm.name), line, keyOf(scales[i]));
      column.dataset.arm = i;
      return column;
    }));
    if (inside) texts.querySelector(`[data-arm="${inside[0]}"] [aria-current], [data-arm="${inside[0]}"] [tabindex="0"]`)?.focus();
  }
  const tokenUnder = event => {
    const key = event.target.closest(".token")?.dataset.key;
    return key === undefined ? null : +key >= first ? { step: +key - first } : { key: +key };
  };
  listen(texts, tokenUnder, token => token, pressed => ({
    ArrowLeft: { step: state.step - 1 }, ArrowRight: { step: state.step + 1 }, Home: { step: 0 }, End: { step: steps - 1 },
  })[pressed]);

  // --- tables

  function tableOf(caption, titles, rows) {
    const head = make("tr", {}, ...titles.map(title => make("th", { scope: "col" }, title)));
    const body = rows.map(cells => make("tr", {}, ...cells.map((cell, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, cell))));
    return make("div", { className: "box", tabIndex: 0, role: "region", "aria-label": caption },
      make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...body)));
  }
  /** A table anew, with the place that was scrolled to and the element that had the focus. */
  function fill(details, build) {
    const old = details.querySelector(".box"), focusable = box => [box, ...box.querySelectorAll("button")];
    const at = old ? focusable(old).indexOf(root.ownerDocument.activeElement) : -1, [top, left] = [old?.scrollTop, old?.scrollLeft];
    const pressed = root.ownerDocument.activeElement?.getAttribute("aria-label");
    old?.remove();
    if (!details.open) return;
    const box = build();
    details.append(box);
    if (!old) return;
    [box.scrollTop, box.scrollLeft] = [top, left];
    const same = pressed && [...box.querySelectorAll("button")].find(button => button.getAttribute("aria-label") === pressed);
    if (at >= 0) (same ?? focusable(box)[at])?.focus({ preventScroll: true });
  }
  function mapRows() {
    const rows = atStep(state.step, i => numbers.row(i, state.step, headOf(state.head)));
    return Array.from({ length: first + state.step }, (_, key) => {
      const values = rows.map(row => row[key] ?? MISSING);
      return [String(key), PARTS[partOf(key)], ...arms.flatMap((arm, i) => [quoted(arm.keys[key] ?? ""), shown(values[i])]),
        ...(two ? [shown(values[1] - values[0], true)] : [])];
    });
  }
  const showTables = () => {
    fill(rowTable, () => tableOf(`Attention of head ${state.head} at step ${state.step}`,
      ["key", "part", ...arms.flatMap(arm => [`token, ${arm.name}`, arm.name]), ...(two ? ["difference"] : [])], mapRows()));
    fill(headTable, () => {
      const columns = Object.values(columnsOf());
      return tableOf("Every head at this step", ["head", ...columns.map(column => column.title)],
        headNames.map((name, head) => [button(name, `Choose head ${name}`, () => set({ head: name })),
          ...columns.map(column => shown(column.mean[head], column.split) + within({ low: column.low?.[head], high: column.high?.[head] }))]));
    });
  };

  // --- the readout

  function tell() {
    const now = { ...state, ...hover }, head = headOf(now.head), key = Math.min(now.key, first + now.step - 1);
    const values = atStep(now.step, i => numbers.row(i, now.step, head)[key]);
    const masses = atStep(now.step, i => numbers.mass(i, data.steered, now.step, head));
    const odds = atStep(now.step, i => numbers.odds(i, now.step, head));
    const beside = (list, sign) => arms.map((arm, i) => `${arm.name} ${shown(list[i])}`).join(", ") + (two ? `, difference ${shown(list[1] - list[0], sign)}` : "");
    const rounding = two && !Number.isNaN(values[1] - values[0]) ? ` (±${numbers.unsure(...values).toPrecision(1)})` : "";
    const named = i => arms[i].keys[key] ?? "", same = new Set(arms.map((arm, i) => named(i))).size === 1;
    const word = same ? quoted(named(0)) : arms.map((arm, i) => quoted(named(i))).join(" / ");
    const next = arms.map(arm => now.step < arm.steps ? quoted(arm.keys[first + now.step]) : "none");
    const lines = [
      `Step ${now.step} predicts ${new Set(next).size === 1 ? next[0] : next.join(" / ")}. ${head === "mean" ? "Mean of all heads" : `Head ${now.head}`}, key ${key} ${word} (${PARTS[partOf(key)]}): ${beside(values, true)}${rounding}.`,
      `On the ${data.steered}: ${beside(masses, true)}. Log-odds: ${beside(odds, true)}.`,
    ];
    for (const metric of metrics) lines.push(`Control ${metric}: ${beside(arms.map(arm => arm.control[metric]?.[now.step] ?? MISSING), true)}.`);
    const facts = { step: now.step, head: now.head, key, part: partOf(key), difference: two ? values[1] - values[0] : "" };
    values.forEach((value, i) => { facts[`value${i}`] = value; });
    masses.forEach((value, i) => { facts[`mass${i}`] = value; });
    odds.forEach((value, i) => { facts[`odds${i}`] = value; });
    if (head !== "mean") {
      // In the grid the head is what one asks about, and first the value that is drawn; those of the step stand above.
      const first = hover ? "head" in hover && !("key" in hover) : heads.contains(root.ownerDocument.activeElement), sentences = [];
      const names = new Set([...(first ? [state.grid] : []), ...Object.keys(data.study), ...(grids.run ? ["run"] : [])]);
      for (const name of [...names].filter(name => name !== "mass" && name !== "odds")) {
        const study = data.study[name];
        for (const panel of valuesOf(name)) {
          const one = { mean: panel.mean[head], low: panel.low?.[head], high: panel.high?.[head] };
          sentences.push(`${study ? study.about : `${grids[name]}, ${panel.title}`} ${shown(one.mean, panel.title === "difference")}${within(one)}${study?.measure ? ` ${study.measure}` : ""}`);
          if (study) Object.assign(facts, { [name]: one.mean, [`${name}Low`]: one.low, [`${name}High`]: one.high });
        }
      }
      if (sentences.length) lines.splice(first ? 0 : lines.length, 0, `Head ${now.head}: ${sentences.join("; ")}.`);
    }
    for (const name of Object.keys(el.dataset)) if (name !== "ready" && !(name in facts)) delete el.dataset[name];
    for (const [name, value] of Object.entries(facts)) el.dataset[name] = value ?? "";
    readout.replaceChildren(...lines.map(line => make("span", {}, line)));
  }

  // --- all of it

  function show() {
    slider.value = state.step;
    slider.setAttribute("aria-valuetext", `step ${state.step} of ${steps - 1}`);
    stepName.textContent = `${state.step} of ${steps - 1}`;
    for (const field of root.querySelectorAll("select")) field.value = state[field.name];
    for (const field of root.querySelectorAll("input[type=checkbox]")) field.checked = field.name === "bos" ? withoutBos() : state[field.name] === "1";
    const tall = width => Math.min(Math.max(steps * 6, 160), 420) * Math.min(1, 0.55 + width / 900) + SPACE.top + SPACE.bottom;
    mapTitle.textContent = state.head === "mean" ? "Mean of all heads" : `Head ${state.head}`;
    figuresIn(maps, mapsOf(state.head), tall);
    figuresIn(heads, gridsOf(), () => Math.min(Math.max(data.layers * 12, 72), 480) + SPACE.top + SPACE.bottom);
    showTexts();
    showTables();
    tell();
  }

  // --- files

  function rowsOf(panel) {
    if (panel === "text") {
      return [["arm", "key", "step", "part", "token", colours[state.colour]],
        ...arms.flatMap((arm, i) => wordsOf(i).map(word => [arm.name, word.key, word.step < 0 ? "" : word.step, PARTS[word.part], word.text, word.value]))];
    }
    if (panel === "map") {
      const rows = [["layer", "head", "arm", "step", "key", "part", "token", "attention", ...(two ? ["difference from the other arm"] : [])]];
      const names = state.head === "mean" ? ["mean", "mean"] : state.head.split(".").map(Number), head = headOf(state.head);
      arms.forEach((arm, i) => {
        for (let step = 0; step < arm.steps; step++) {
          const beside = two && step < both ? numbers.row(1 - i, step, head) : null;
          numbers.row(i, step, head).forEach((value, key) => rows.push([...names, arm.name, step, key, PARTS[partOf(key)], arm.keys[key],
            masked(key) ? MISSING : value, ...(two ? [beside && !masked(key) ? value - beside[key] : MISSING] : [])]));
        }
      });
      return rows;
    }
    const columns = columnsOf();
    const names = Object.values(columns).flatMap(column => column.low ? [column.title, `${column.title}, low`, `${column.title}, high`] : [column.title]);
    return [["layer", "head", ...names], ...headNames.map((_, head) => [Math.floor(head / data.heads), head % data.heads,
      ...Object.values(columns).flatMap(column => (column.low ? [column.mean, column.low, column.high] : [column.mean]).map(list => list[head] ?? MISSING))])];
  }
  /** A panel as SVG. */
  function picture(panel) {
    const look = lookOf(), bold = "600 12px sans-serif";
    if (panel === "text") {
      const width = 640, measure = make("canvas").getContext("2d"), size = 20;
      measure.font = "13px sans-serif";
      const words = arms.map((arm, i) => wordsOf(i)), scales = textScales(words), placedWords = [];
      let y = 24;
      words.forEach((list, i) => {
        placedWords.push({ title: arms[i].name, y });
        let x = 10;
        y += size + 6;
        for (const word of list) {
          const text = word.text === "" ? "·" : word.text.replace(/\n/g, "↵"), w = measure.measureText(text).width;
          if (x + w > width - 10) { x = 10; y += size; }
          placedWords.push({ text, x, y, w, colour: Number.isNaN(word.value) ? null : scales[i].colour(word.value) });
          x += w;
        }
        y += 2 * size;
      });
      const ctx = new Svg(width, y), plain = look.ink;
      ctx.fillStyle = look.page;
      ctx.fillRect(0, 0, width, y);
      for (const word of placedWords) {
        ctx.textAlign = "left";
        ctx.font = word.title ? bold : "13px sans-serif";
        if (word.colour) {
          ctx.fillStyle = css(word.colour);
          ctx.fillRect(word.x, word.y - 14, word.w, size - 2);
        }
        ctx.fillStyle = word.colour ? inkOn(word.colour) : plain;
        ctx.fillText(word.title ?? word.text, word.title ? 10 : word.x, word.y);
      }
      return ctx;
    }
    const panels = panel === "grid" ? gridsOf() : mapsOf(state.head), w = 340;
    const h = panel === "grid" ? Math.max(data.layers * 12, 72) + 26 : 360, ctx = new Svg(panels.length * w + 10, h + 63);
    ctx.fillStyle = look.page;
    ctx.fillRect(0, 0, panels.length * w + 10, h + 63);
    panels.forEach((drawnPanel, i) => {
      ctx.font = bold;
      ctx.textAlign = "left";
      ctx.fillStyle = look.ink;
      const what = panel === "grid" ? (data.study[state.grid] ? drawnPanel.title : grids[state.grid]) : state.head === "mean" ? "mean of all heads" : `head ${state.head}`;
      ctx.fillText(drawnPanel.title, 10 + i * w, 20);
      ctx.font = "10px sans-serif";
      ctx.fillStyle = look.pale;
      const drawn = `colours from ${shown(drawnPanel.scale.min)} to ${shown(drawnPanel.scale.max)}${drawnPanel.scale.log ? ", log" : ""}`;
      [...(what === drawnPanel.title ? [] : [what]), drawn].forEach((line, l) => ctx.fillText(line, 10 + i * w, 34 + 13 * l));
      drawPanel(ctx, marked(drawnPanel, look), w - 10, h, look, 5 + i * w, 51);
    });
    return ctx;
  }
  const fileOf = (panel, kind) => kind === "CSV" ? new Blob(["\ufeff", csvText(rowsOf(panel))], { type: "text/csv" })
    : new Blob([String(picture(panel))], { type: "image/svg+xml" });
  function save(panel, kind) {
    const address = URL.createObjectURL(fileOf(panel, kind));
    make("a", { href: address, download: `${panel}-step${state.step}-head${state.head}.${kind.toLowerCase()}` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  // --- life

  const dark = matchMedia("screen and (prefers-color-scheme: dark)");
  const follow = () => {
    const { step, head } = chosen();
    if (step === state.step && head === state.head) return;  // what `set` wrote
    take({ step, head });
    show();
  };
  let width = 0;
  const resized = new ResizeObserver(() => {
    if (root.clientWidth !== width) {
      width = root.clientWidth;
      show();
    }
  });
  take(chosen());
  show();
  width = root.clientWidth;
  resized.observe(root);
  dark.addEventListener("change", show);
  model.on("change:head", follow);
  model.on("change:token", follow);
  el.viewer = { set, state, file: fileOf, numbers };
  el.dataset.ready = "yes";
  return () => {
    resized.disconnect();
    dark.removeEventListener("change", show);
    model.off("change:head", follow);
    model.off("change:token", follow);
  };
}

export default { render };

"use strict";
// Draws the curves of the page from the JSON in it. Charts share their cursor, their stretch of the
// x axis, and which runs stand out; sweep.js adds what only several runs have.
const data = JSON.parse(document.getElementById("data").textContent);
const { metrics } = data, several = data.runs.length > 1;
const views = []; // each has draw(), and point() for what follows the pointer
const redraw = () => views.forEach((view) => view.draw());
const repoint = () => views.forEach((view) => view.point());

const make = (name, attributes, parent, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
};
const node = (name, className, parent, text) => {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  parent?.append(element);
  return element;
};

// ---- Numbers ----

const short = (v, digits = 4) => {
  const size = Math.abs(v);
  if (v === 0) return "0";
  if (size >= 1e6 || size < 1e-4) {
    return v.toExponential(digits - 2).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  return (+v.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 20 });
};
// Several values, with the digits that tell them apart.
function texts(values) {
  const count = new Set(values).size;
  for (let digits = 4; ; digits++) {
    const found = values.map((v) => short(v, digits));
    if (digits === 12 || new Set(found).size === count) return found;
  }
}
function duration(seconds) {
  if (seconds < 60) return `${+seconds.toPrecision(seconds < 10 ? 2 : 3)} s`;
  const units = [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]];
  const [unit, size, smaller, rest] = units.find((u) => seconds >= u[1]);
  return `${Math.floor(seconds / size)} ${unit} ${Math.floor((seconds % size) / rest)} ${smaller}`;
}
const range = (values) =>
  values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
// The range widened so that ticks fit in: never so narrow that numbers cannot be told apart.
function widened([low, high], share = 0.06) {
  if (!(low <= high)) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  const space = high - low > size * 1e-12 ? (high - low) * share : size * 0.5 || 1;
  return [low - space, high + space];
}
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const gap = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= 0.7 * rough);
  const values = [];
  for (let i = Math.ceil(low / gap - 1e-9); i * gap <= high + gap * 1e-9; i++) {
    values.push(i * gap + 0); // no -0
  }
  return { values, gap };
}
// Ticks as [value, text], as many decimals in each as their distance needs.
function axisTicks(low, high, count) {
  const { values, gap } = ticks(low, high, count);
  const top = Math.max(...values.map(Math.abs)), power = (v) => Math.floor(Math.log10(v) + 1e-9);
  const decimals = Math.min(20, Math.max(0, -power(gap)));
  return values.map((v) => {
    if (Math.abs(v) < gap / 2) return [0, "0"];
    if (top >= 1e-4 && (top < 1e6 || decimals)) {
      return [v, v.toLocaleString("en",
        { minimumFractionDigits: decimals, maximumFractionDigits: decimals })];
    }
    const digits = Math.min(15, Math.max(0, power(Math.abs(v)) - power(gap)));
    return [v, v.toExponential(digits).replace("e+", "e")];
  });
}
// The same for an axis whose ends are logarithms: decades, parts of them, or what plain ticks are.
function logTicks(low, high, count) {
  const decades = high - low, every = Math.ceil(decades / 6), found = [];
  if (decades < 0.7) return axisTicks(10 ** low, 10 ** high, count).filter(([v]) => v > 0);
  for (let power = Math.floor(low); power <= high; power++) {
    for (const factor of power % every ? [] : decades < 2.2 ? [1, 2, 5] : [1]) {
      const value = +`${factor}e${power}`, at = Math.log10(value);
      if (at >= low && at <= high) found.push([value, short(value)]);
    }
  }
  return found;
}

// ---- Which runs stand out ----

const MOST = 8;
const DASHES = ["", "7 3", "2 2.5", "9 3 2 3", "4 2", "13 3", "7 2 2 2 2 2", "3 1.5"];
const chosen = new Map(); // run -> its colour and dashes
let pointed = null; // the run under the pointer
let isByHand = false; // whether the reader chose which runs stand out
function choose(run) {
  if (chosen.delete(run)) return;
  if (chosen.size === MOST) chosen.delete(chosen.keys().next().value); // the first makes room
  const taken = new Set(chosen.values());
  chosen.set(run, [...Array(MOST).keys()].find((slot) => !taken.has(slot)));
}
function chooseByHand(run) { choose(run); isByHand = true; redraw(); }
function lookOf(run) {
  const slot = chosen.get(run);
  return slot === undefined ? { color: "var(--ink)", dash: "" }
    : { color: `var(--s${slot})`, dash: DASHES[slot] };
}
function swatch(look, parent) {
  const box = make("svg", { class: "swatch", width: 26, height: 10 }, parent);
  make("line", { x1: 0, x2: 26, y1: 5, y2: 5, class: "curve", style: `--c:${look.color}`,
    "stroke-dasharray": look.dash }, box);
}

// ---- The x axis ----

const UNITS = [["s", 1], ["min", 60], ["h", 3600], ["d", 86400]];
let axis = "step", whole = [0, 1], zoom = null, unit = UNITS[0];
// Where a run's step lies on the axis; NaN where the run does not tell.
function along(run, step) {
  if (axis === "step") return step;
  const knots = data.runs[run].axes[axis];
  if (!knots) return NaN;
  let a = 0, b = knots.length - 1;
  while (b - a > 1) { const m = (a + b) >> 1; if (knots[m][0] <= step) a = m; else b = m; }
  const [[s0, v0], [s1, v1]] = [knots[a], knots[b]];
  return s1 > s0 ? v0 + ((step - s0) / (s1 - s0)) * (v1 - v0) : v0;
}
function setAxis(name) {
  [axis, zoom] = [name, null];
  for (const chart of charts) {
    for (const s of chart.series) {
      s.drawn = s.points.map(([step, y]) => [along(s.run, step), y, step]).filter((p) => p[0] >= 0);
      s.crosses = s.marks.map(([step, word]) => [along(s.run, step), word, step])
        .filter((p) => p[0] >= 0);
    }
  }
  const ends = charts.flatMap((c) =>
    c.series.flatMap((s) => [...s.drawn, ...s.crosses].map((p) => p[0])));
  const skips = data.runs.flatMap((r, run) => r.skips.map((step) => along(run, step)));
  const [low, high] = range([...ends, ...skips].filter((x) => x >= 0));
  whole = low < high ? [low, high] : low === high ? [low - 1, high + 1] : [0, 1];
  unit = UNITS.findLast(([, size]) => whole[1] >= 2 * size) || UNITS[0];
  redraw();
}
const axisTitle = () => (axis === "time" ? `running time (${unit[0]})` : `${axis}`);
function placeText(x) {
  if (axis === "time") return duration(Math.max(0, x));
  return axis === "epoch" ? `epoch ${short(x)}` : `${axis} ${Math.round(x).toLocaleString("en")}`;
}

// ---- Charts ----

const hidden = new Set(); // labels of a single run, as "title|label"
const logarithmic = new Set(); // titles
const right = 12, top_ = 8, bottom = 36;
let cursor = null, smoothing = 0, showOthers = true;

function smooth(points) {
  let mean = 0, weight = 0;
  return points.map(([x, y]) => {
    mean = smoothing * mean + (1 - smoothing) * y;
    weight = smoothing * weight + (1 - smoothing);
    return [x, mean / weight];
  });
}
function nearest(points, x) {
  let a = 0, b = points.length - 1;
  while (b - a > 1) { const m = (a + b) >> 1; if (points[m][0] <= x) a = m; else b = m; }
  return Math.abs(points[a][0] - x) <= Math.abs(points[b][0] - x) ? points[a] : points[b];
}
// The height of a curve between its points; null beside its ends.
function heightAt(points, x) {
  let a = 0, b = points.length - 1;
  if (!points.length || x < points[0][0] || x > points[b][0]) return null;
  while (b - a > 1) { const m = (a + b) >> 1; if (points[m][0] <= x) a = m; else b = m; }
  const [[x0, y0], [x1, y1]] = [points[a], points[b]];
  return x1 > x0 ? y0 + ((x - x0) / (x1 - x0)) * (y1 - y0) : y0;
}

// A box of rows beside the pointer.
class Tip {
  constructor(place) {
    this.place = place;
    this.box = node("div", "tip", place);
    this.box.hidden = true;
  }
  show(title, rows, x, y) {
    this.box.replaceChildren();
    node("div", "title", this.box, title);
    for (const { look, name, text, strong } of rows) {
      const row = node("div", strong ? "row strong" : "row", this.box);
      if (look) swatch(look, row);
      node("span", "", row, name);
      node("b", "", row, text);
    }
    this.box.hidden = false;
    const room = this.place.clientWidth - this.box.offsetWidth - 4;
    const left = x + 16 > room ? x - this.box.offsetWidth - 16 : x + 16;
    this.box.style.left = `${Math.max(4, Math.min(left, room))}px`;
    this.box.style.top = `${y}px`;
  }
  hide() { this.box.hidden = true; }
}

class Chart {
  constructor(place, chart, index) {
    Object.assign(this, { place, index, title: chart.title, visible: false, left: 40 });
    const labels = [...new Set(chart.series.map((s) => s.label))];
    this.series = chart.series.map((s) => ({ ...s, place: labels.indexOf(s.label) }));
    const caption = node("figcaption", "", place);
    node("span", "", caption, this.title);
    if (this.series.every((s) => s.points.every((p) => p[1] > 0))) {
      const button = node("button", "", caption, "log");
      button.onclick = () => {
        button.classList.toggle("on");
        if (!logarithmic.delete(this.title)) logarithmic.add(this.title);
        this.draw();
      };
    }
    if (!several && labels.length > 1) this.legend(node("div", "legend", place));
    this.svg = make("svg", { class: "plot", role: "img", "aria-label": this.title }, place);
    this.tip = new Tip(place);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(place);
    new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible && this.stale) this.draw();
    }, { rootMargin: "400px" }).observe(place);
  }
  legend(place) {
    for (const s of this.series) {
      const button = node("button", "", place);
      swatch(this.look(s), button);
      button.append(s.label);
      button.onclick = () => {
        button.classList.toggle("off");
        if (!hidden.delete(this.key(s))) hidden.add(this.key(s));
        this.draw();
      };
    }
  }
  key(s) { return `${this.title}|${s.label}`; }
  look(s) {
    const slot = s.place % MOST;
    return several ? lookOf(s.run) : { color: `var(--s${slot})`, dash: DASHES[slot] };
  }
  lit() {
    return this.series.filter((s) => (several ? chosen.has(s.run) : !hidden.has(this.key(s))));
  }
  draw() {
    this.stale = !this.visible;
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (this.stale || !width) return;
    this.svg.replaceChildren();
    const [x0, x1] = zoom || whole, log = logarithmic.has(this.title);
    const scale = log ? Math.log10 : (v) => v, lit = this.lit();
    const seen = (series) => series.flatMap((s) =>
      s.drawn.filter((p) => p[0] >= x0 && p[0] <= x1).map((p) => scale(p[1])));
    const values = seen(lit);
    const [low, high] = widened(range(values.length || !several ? values : seen(this.series)));
    const rows = (log ? logTicks : axisTicks)(low, high, 4);
    this.left = 14 + 6.3 * Math.max(3, ...rows.map(([, text]) => text.length));
    const wide = width - this.left - right, tall = height - top_ - bottom;
    this.x = (x) => this.left + ((x - x0) / (x1 - x0)) * wide;
    this.y = (v) => height - bottom - ((scale(v) - low) / (high - low)) * tall;
    this.value = (px) => x0 + ((px - this.left) / wide) * (x1 - x0);
    this.axes(rows, x0, x1, width, height);
    const id = `clip${this.index}`, clip = make("clipPath", { id }, this.svg);
    make("rect", { x: this.left - 5, y: 0, width: Math.max(1, wide + 10),
      height: height - bottom + 5 }, clip);
    this.body = make("g", { "clip-path": `url(#${id})` }, this.svg);
    if (several && showOthers) {
      const others = this.series.filter((s) => !chosen.has(s.run) && s.drawn.length);
      make("path", { class: "curve others", d: others.map((s) => this.path(s.drawn)).join("") },
        this.body);
    }
    this.front = make("g", {}, this.body);
    this.events(lit, height);
    for (const s of lit) this.curve(s);
    this.overlay = make("g", {}, this.body);
    this.point();
  }
  axes(rows, x0, x1, width, height) {
    for (const [value, text] of rows) {
      const y = this.y(value);
      make("line", { class: "grid", x1: this.left, x2: width - right, y1: y, y2: y }, this.svg);
      make("text", { x: this.left - 6, y: y + 4, "text-anchor": "end" }, this.svg, text);
    }
    const size = axis === "time" ? unit[1] : 1, isCount = axis === "step" || axis === "samples";
    const marks = axisTicks(x0 / size, x1 / size, width > 500 ? 8 : 4)
      .filter(([value]) => !isCount || Number.isInteger(value));
    const brief = marks.map(([value, text]) => (value < 1e5 ? text
      : value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 })));
    const isClear = new Set(brief).size === brief.length;
    marks.forEach(([value, text], index) => {
      const x = this.x(value * size), end = x > width - right - 20;
      make("text", { x: end ? width - 2 : x, y: height - bottom + 16,
        "text-anchor": end ? "end" : "middle" }, this.svg, isClear ? brief[index] : text);
    });
    make("text", { class: "unit", x: (this.left + width - right) / 2, y: height - 5,
      "text-anchor": "middle" }, this.svg, axisTitle());
  }
  events(lit, height) {
    for (const run of new Set(lit.map((s) => s.run))) {
      const { name, resumes, skips } = data.runs[run];
      for (const step of resumes) {
        const x = this.x(along(run, step));
        if (!(x >= 0)) continue;
        const line = make("line", { class: "resume", x1: x, x2: x, y1: top_, y2: height - bottom,
          style: several ? `--c:${lookOf(run).color}` : "" }, this.front);
        make("title", {}, line, `${name}: resumed from step ${step}`);
      }
      const marks = new Set(skips.map((step) => Math.round(this.x(along(run, step)))));
      for (const x of [...marks].filter((x) => x >= 0)) {
        make("line", { class: "skip", x1: x, x2: x, y1: height - bottom - 9, y2: height - bottom },
          this.front);
      }
    }
  }
  path(points) {
    return `M${points.map(([x, y]) => `${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("L")}`;
  }
  curve(s, parent = this.front, extra = "") {
    const look = this.look(s), style = `--c:${look.color}`;
    const few = s.drawn.length <= 24; // each is seen, and none is smoothed away
    const add = (points, kind) => make("path", { class: `curve ${kind}`, style,
      "stroke-dasharray": look.dash, d: this.path(points) }, parent);
    const drawn = smoothing && !few ? smooth(s.drawn) : s.drawn;
    if (drawn.length > 1) {
      if (drawn !== s.drawn) add(s.drawn, "raw");
      add(drawn, extra);
    }
    for (const [x, y] of few ? s.drawn : []) this.dot(x, y, 2.6, look, parent);
    for (const [x, word, step] of s.crosses) {
      const mark = make("text", { class: "mark", x: this.x(x), y: top_ + 8 }, parent, "\u00d7");
      make("title", {}, mark, `${this.name(s)}: ${word} at step ${step}`);
    }
  }
  dot(x, y, r, look, parent) {
    make("circle", { class: "dot", style: `--c:${look.color}`, cx: this.x(x), cy: this.y(y), r },
      parent);
  }
  name(s) { return several ? data.runs[s.run].name : s.label; }
  point() {
    if (!this.overlay || !this.visible) return;
    this.overlay.replaceChildren();
    this.tip.hide();
    const strong = this.series.find((s) => several && s.run === pointed && s.drawn.length);
    this.front.classList.toggle("dim", Boolean(strong));
    if (strong) this.curve(strong, this.overlay, "strong");
    if (!cursor) return;
    const height = this.svg.clientHeight, x = this.x(cursor.x);
    make("line", { class: "cursor", x1: x, x2: x, y1: top_, y2: height - bottom }, this.overlay);
    if (cursor.from !== undefined) {
      const start = this.x(cursor.from);
      make("rect", { class: "zoom", x: Math.min(start, x), width: Math.abs(x - start), y: top_,
        height: height - top_ - bottom }, this.overlay);
    }
    const told = this.lit().filter((s) => s.drawn.length);
    if (strong && !told.includes(strong)) told.push(strong);
    const found = told.map((s) => [s, nearest(s.drawn, cursor.x)])
      .sort((a, b) => b[1][1] - a[1][1]);
    for (const [s, [px, py]] of found) this.dot(px, py, 4, this.look(s), this.overlay);
    if (cursor.chart === this && found.length) this.tell(found, x);
  }
  tell(found, x) {
    const values = texts(found.map(([, p]) => p[1])), step = found[0][1][2];
    const areAlike = found.every(([, p]) => p[2] === step);
    const at = (p) => ` at step ${p[2].toLocaleString("en")}`;
    const rows = found.map(([s, p], index) => ({
      look: this.look(s), name: `${this.name(s)}${areAlike ? "" : at(p)}`,
      text: values[index], strong: several && s.run === pointed,
    }));
    const drop = this.svg.getBoundingClientRect().top - this.place.getBoundingClientRect().top;
    const where = axis === "step" ? "" : `${placeText(found[0][1][0])}, `;
    const title = areAlike ? `${where}step ${step.toLocaleString("en")}` : placeText(cursor.x);
    this.tip.show(title, rows, x, drop + 6);
  }
  // The run whose curve is closest to a place, if one is close.
  runAt(px, py) {
    const x = this.value(px);
    let found = null, least = 18;
    for (const s of this.series) {
      if (!s.drawn.length || (!showOthers && !chosen.has(s.run))) continue;
      const value = heightAt(s.drawn, x), [dotX, dotY] = nearest(s.drawn, x);
      const away = value !== null ? Math.abs(this.y(value) - py)
        : Math.hypot(this.x(dotX) - px, this.y(dotY) - py);
      if (away < least) [found, least] = [s.run, away];
    }
    return found;
  }
  listen() {
    const at = (event) => {
      const box = this.svg.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.svg.onpointermove = (event) => {
      const [px, py] = at(event);
      cursor = { ...cursor, x: this.value(px), chart: this };
      if (several && cursor.from === undefined) pointed = this.runAt(px, py);
      repoint();
    };
    this.svg.onpointerdown = (event) => {
      const x = this.value(at(event)[0]);
      cursor = { x, from: x, chart: this };
      repoint();
    };
    this.svg.onpointerleave = () => { cursor = pointed = null; repoint(); };
    this.svg.onpointercancel = this.svg.onpointerleave;
    this.svg.onpointerup = (event) => {
      const [px, py] = at(event), x = this.value(px);
      const ends = [cursor?.from ?? x, x].sort((a, b) => a - b);
      const run = several ? this.runAt(px, py) : null;
      cursor = null;
      if (this.x(ends[1]) - this.x(ends[0]) > 5) zoom = ends;
      else if (run !== null && event.pointerType === "mouse") return chooseByHand(run);
      redraw();
    };
    this.svg.ondblclick = () => { zoom = null; redraw(); };
  }
}
const charts = [...document.querySelectorAll("[data-chart]")].map(
  (place) => new Chart(place, data.charts[place.dataset.chart], place.dataset.chart));
views.push(...charts);
window.onbeforeprint = () => charts.forEach((chart) => { chart.visible = true; chart.draw(); });

// What a single run came to: its evaluation first.
function tiles(place) {
  const run = data.runs[0], tile = (name, text, hint) => {
    const box = node("div", "", place);
    node("dt", "", box, name);
    const value = node("dd", "", box, typeof text === "number" ? text.toLocaleString("en") : text);
    if (hint) node("small", "", value, hint);
  };
  const shown = metrics.filter((metric) => metric.name.startsWith("eval/")).slice(0, 4);
  for (const { name, is_low, low, high, last } of shown) {
    const best = (is_low ? low : high)[0], value = last[0][0];
    const hint = best ? `best ${short(best[0])} at step ${best[1].toLocaleString("en")}` : "";
    tile(name, typeof value === "number" ? short(value) : value, hint);
  }
  const { step, epoch, samples } = run.counters;
  for (const [name, value] of Object.entries({ steps: step, epochs: epoch, samples })) {
    if (value !== undefined) tile(name, value);
  }
  if (run.ended !== null) {
    tile("ended by", run.ended);
    tile("running time", duration(run.seconds));
    tile("goodput", run.goodput === null ? "not known" : `${(100 * run.goodput).toFixed(1)} %`);
    tile("resumes", run.resumes.length);
  }
  tile("skipped steps", run.skipped);
}
if (!several) tiles(document.getElementById("tiles"));

// The last values, a column for each run, or of many a row.
function lastValues(place) {
  const cell = ({ low, high, last }, run) => {
    const box = node("td", ""), entries = [last, low, high].map((values) => values[run]?.[0]);
    const numbers = entries.filter((v) => typeof v === "number"), written = texts(numbers);
    const text = (v) => (typeof v === "number" ? written[numbers.indexOf(v)] : v);
    if (last[run]) node("b", "", box, text(entries[0]));
    if (low[run]) node("small", "", box, `${text(entries[1])} to ${text(entries[2])}`);
    return box;
  };
  const runs = data.runs.map((_, run) => run), isWide = runs.length > 6; // FEW_RUNS of page.py
  const [across, down] = isWide ? [metrics, runs] : [runs, metrics];
  const title = (entry) => (typeof entry === "object" ? entry.name : data.runs[entry].name);
  const table = node("table", "values", node("div", "wide tall", place));
  const head = node("tr", "", node("thead", "", table)), body = node("tbody", "", table);
  node("th", "", head, isWide ? "run" : "metric");
  for (const entry of across) {
    node("th", "", head, several ? title(entry) : "last, and lowest to highest");
  }
  for (const entry of down) {
    const row = node("tr", "", body);
    node("th", "", row, title(entry));
    row.append(...across.map((other) => (isWide ? cell(other, entry) : cell(entry, other))));
  }
}
if (metrics.length) lastValues(document.getElementById("values"));
else document.getElementById("values").parentElement.hidden = true;

// ---- What the reader sets ----

function choice(parent, label, options, act) {
  const box = node("label", "", parent, label), select = node("select", "", box);
  for (const [value, text] of options) node("option", "", select, text).value = value;
  select.onchange = () => act(select.value);
  return select;
}
const tools = document.getElementById("tools");
if (tools) {
  const known = ["time", "epoch", "samples"].filter((name) => data.runs.some((r) => r.axes[name]));
  const names = ["step", ...known].map((name) => [name, name === "time" ? "running time" : name]);
  choice(tools, "x axis", names, setAxis).id = "axis";
  const label = node("label", "", tools, "smoothing"), slider = node("input", "", label);
  Object.assign(slider, { type: "range", min: 0, max: 0.98, step: 0.02, value: 0 });
  slider.oninput = () => { smoothing = +slider.value; redraw(); };
  const key = document.getElementById("key");
  if (data.runs.some((r) => r.resumes.length)) key.append("Dashed line: a resume. ");
  if (data.runs.some((r) => r.skips.length)) key.append("Red at the foot: skipped steps. ");
  if (data.charts.some((c) => c.series.some((s) => s.marks.length))) {
    key.append("Red cross: a value that is not finite.");
  }
}

// The look: what the system prefers, until the reader chooses.
const root = document.documentElement;
const asked = new URLSearchParams(location.search).get("theme");
if (asked === "light" || asked === "dark") root.dataset.theme = asked;
document.getElementById("theme").onclick = () => {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
};
if (!several) setAxis("step");

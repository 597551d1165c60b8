"use strict";
// Draws the curves of the page from the JSON in it. Charts share their cursor and their stretch of
// steps.
const data = JSON.parse(document.getElementById("data").textContent);
const several = data.runs.length > 1;
const hidden = new Set(); // "run" or "run|label"
const logarithmic = new Set(); // titles
const left = 52, right = 12, top_ = 8, bottom = 22;
let zoom = null, cursor = null, smoothing = 0;

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
  parent.append(element);
  return element;
};
const short = (v) => {
  const size = Math.abs(v);
  if (v === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return v.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return size >= 1e3 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
};
const steps = data.charts.flatMap((c) => c.series.flatMap((s) =>
  [...s.points, ...s.marks].map((p) => p[0]))).concat(data.runs.flatMap((r) => r.skips));
const ends = steps.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
const whole = ends[0] < ends[1] ? ends : [ends[0] - 1, ends[0] + 1];

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= 0.7 * rough);
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) found.push(i * size + 0); // no -0
  return found;
}
function smooth(points) {
  let mean = 0, weight = 0;
  return points.map(([x, y]) => {
    mean = smoothing * mean + (1 - smoothing) * y;
    weight = smoothing * weight + (1 - smoothing);
    return [x, mean / weight];
  });
}
const nearest = (points, x) => {
  let a = 0, b = points.length - 1;
  while (b - a > 1) { const m = (a + b) >> 1; if (points[m][0] <= x) a = m; else b = m; }
  return points.length && Math.abs(points[a][0] - x) <= Math.abs(points[b][0] - x) ? points[a] : points[b];
};

class Chart {
  constructor(place, chart) {
    Object.assign(this, { place, title: chart.title, positive: true });
    const labels = [...new Set(chart.series.map((s) => s.label))];
    this.series = chart.series.map((s) => ({
      ...s, key: `${s.run}|${s.label}`, dash: several ? labels.indexOf(s.label) : 0,
      color: `var(--s${(several ? s.run : labels.indexOf(s.label)) % 8})`,
      name: several ? `${data.runs[s.run].name} ${labels.length > 1 ? s.label : ""}` : s.label,
    }));
    this.positive = this.series.every((s) => s.points.every((p) => p[1] > 0));
    const caption = node("figcaption", "", place);
    node("span", "", caption, this.title);
    if (this.positive) {
      const button = node("button", "", caption, "log");
      button.onclick = () => {
        button.classList.toggle("on");
        if (!logarithmic.delete(this.title)) logarithmic.add(this.title);
        this.draw();
      };
    }
    const legend = node("div", "legend", place);
    for (const s of labels.length > 1 || several ? this.series : []) {
      const button = node("button", "", legend, s.name);
      button.style.setProperty("--c", s.color);
      button.onclick = () => { toggle(s.key, button); this.draw(); };
    }
    this.svg = make("svg", { role: "img", "aria-label": this.title }, place);
    this.tip = node("div", "tip", place);
    this.tip.hidden = true;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(place);
  }
  shown() { return this.series.filter((s) => !hidden.has(s.key) && !hidden.has(String(s.run))); }
  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width) return;
    this.svg.replaceChildren();
    const [x0, x1] = zoom || whole, log = logarithmic.has(this.title);
    const scale = log ? Math.log10 : (v) => v;
    const values = this.shown().flatMap((s) =>
      s.points.filter((p) => p[0] >= x0 && p[0] <= x1).map((p) => scale(p[1])));
    let low = values.reduce((a, b) => Math.min(a, b), Infinity);
    let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (low > high) [low, high] = [0, 1];
    const space = (high - low) * 0.06 || Math.abs(high) * 0.5 || 1;
    [low, high] = [low - space, high + space];
    this.x = (s) => left + ((s - x0) / (x1 - x0)) * (width - left - right);
    this.y = (v) => height - bottom - ((scale(v) - low) / (high - low)) * (height - top_ - bottom);
    this.step = (px) => x0 + ((px - left) / (width - left - right)) * (x1 - x0);
    this.axes(x0, x1, low, high, log, width, height);
    const id = `clip${this.place.dataset.chart}`;
    const clip = make("clipPath", { id }, this.svg);
    make("rect", { x: left - 5, y: 0, width: Math.max(1, width - left - right + 10), height }, clip);
    this.body = make("g", { "clip-path": `url(#${id})` }, this.svg);
    this.events(height);
    for (const s of this.shown()) this.curve(s);
    this.overlay = make("g", {}, this.body);
    this.point();
  }
  axes(x0, x1, low, high, log, width, height) {
    const decades = log && high - low > 1.5;
    const raw = log && !decades ? ticks(10 ** low, 10 ** high, 4) : ticks(low, high, 4);
    const rows = decades ? raw.filter(Number.isInteger).map((v) => 10 ** v) : raw;
    for (const value of rows) {
      const y = this.y(value);
      make("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }, this.svg);
      make("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, this.svg, short(value));
    }
    for (const value of ticks(x0, x1, width > 500 ? 8 : 4).filter(Number.isInteger)) {
      const x = this.x(value), anchor = x > width - right - 24 ? "end" : "middle";
      make("text", { x: anchor === "end" ? width : x, y: height - 6, "text-anchor": anchor },
        this.svg, value.toLocaleString("en", value < 1e5 ? {} : { notation: "compact" }));
    }
  }
  events(height) {
    const runs = new Set(this.shown().map((s) => s.run));
    for (const run of runs) {
      for (const step of data.runs[run].resumes) {
        const x = this.x(step), line = make("line",
          { class: "resume", x1: x, x2: x, y1: top_, y2: height - bottom }, this.body);
        make("title", {}, line, `resumed from step ${step}`);
      }
      const seen = new Set(data.runs[run].skips.map((s) => Math.round(this.x(s))));
      for (const x of seen) {
        make("line", { class: "skip", x1: x, x2: x, y1: height - bottom - 9, y2: height - bottom },
          this.body);
      }
    }
  }
  curve(s) {
    const path = (points, extra) => make("path", {
      class: `curve ${extra}`, style: `--c:${s.color}`, "stroke-dasharray": ["", "5 3", "2 2"][s.dash % 3],
      d: "M" + points.map(([x, y]) => `${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("L"),
    }, this.body);
    const few = s.points.length <= 24; // each is seen, and none is smoothed away
    const drawn = smoothing && !few ? smooth(s.points) : s.points;
    if (drawn.length > 1) {
      if (drawn !== s.points) path(s.points, "raw");
      path(drawn, "");
    }
    if (few) {
      for (const [x, y] of s.points) {
        make("circle", { class: "dot", style: `--c:${s.color}`, cx: this.x(x), cy: this.y(y), r: 2.6 },
          this.body);
      }
    }
    for (const [x, word] of s.marks) {
      const mark = make("text", { class: "mark", x: this.x(x), y: top_ + 8 }, this.body, "\u00d7");
      make("title", {}, mark, `${s.name}: ${word} at step ${x}`);
    }
  }
  point() {
    if (!this.overlay) return;
    this.overlay.replaceChildren();
    this.tip.hidden = true;
    if (!cursor) return;
    const height = this.svg.clientHeight, x = this.x(cursor.step);
    make("line", { class: "cursor", x1: x, x2: x, y1: top_, y2: height - bottom }, this.overlay);
    if (cursor.from !== undefined) {
      const start = this.x(cursor.from);
      make("rect", { class: "zoom", x: Math.min(start, x), width: Math.abs(x - start), y: top_,
        height: height - top_ - bottom }, this.overlay);
    }
    const found = this.shown().filter((s) => s.points.length)
      .map((s) => [s, nearest(s.points, cursor.step)]);
    for (const [s, [px, py]] of found) {
      make("circle", { class: "dot", style: `--c:${s.color}`, cx: this.x(px), cy: this.y(py), r: 4 },
        this.overlay);
    }
    if (cursor.chart === this && found.length) this.tell(found, x);
  }
  tell(found, x) {
    this.tip.replaceChildren();
    for (const [s, [step, value]] of found) {
      const row = node("div", "", this.tip);
      node("i", "", row).style.setProperty("--c", s.color);
      row.append(`${s.name} at ${step.toLocaleString("en")}`);
      node("b", "", row, short(value));
    }
    this.tip.hidden = false;
    const room = this.place.clientWidth - this.tip.offsetWidth - 8;
    const place = x + 28 > room ? Math.max(4, x - this.tip.offsetWidth - 4) : x + 28;
    this.tip.style.left = `${Math.min(place, Math.max(4, room))}px`;
    const drop = this.svg.getBoundingClientRect().top - this.place.getBoundingClientRect().top;
    this.tip.style.top = `${drop + 6}px`;
  }
  listen() {
    const at = (event) => this.step(event.clientX - this.svg.getBoundingClientRect().left);
    this.svg.onpointermove = (event) => show({ ...cursor, step: at(event), chart: this });
    this.svg.onpointerdown = (event) => show({ step: at(event), from: at(event), chart: this });
    this.svg.onpointerleave = () => show(null);
    this.svg.onpointerup = (event) => {
      const range = [cursor?.from ?? at(event), at(event)].sort((a, b) => a - b);
      cursor = null;
      if (this.x(range[1]) - this.x(range[0]) > 5) { zoom = range; redraw(); } else show(null);
    };
    this.svg.ondblclick = () => { zoom = null; redraw(); };
  }
}
const charts = [...document.querySelectorAll(".chart")].map(
  (place) => new Chart(place, data.charts[place.dataset.chart]));
function show(where) { cursor = where; charts.forEach((chart) => chart.point()); }
function redraw() { charts.forEach((chart) => chart.draw()); }
function toggle(key, button) {
  button.classList.toggle("off");
  if (!hidden.delete(key)) hidden.add(key);
}
for (const button of document.querySelectorAll(".run")) {
  button.onclick = () => { toggle(button.dataset.run, button); redraw(); };
}
const slider = document.getElementById("smooth");
if (slider) slider.oninput = () => { smoothing = +slider.value; redraw(); };
const key = document.getElementById("key");
if (key && data.runs.some((r) => r.resumes.length)) key.append("Dashed line: a resume. ");
if (key && data.runs.some((r) => r.skips.length)) key.append("Red at the foot: skipped steps. ");
if (key && data.charts.some((c) => c.series.some((s) => s.marks.length))) {
  key.append("Red cross: a value that is not finite.");
}

// The look: what the system prefers, until the reader chooses.
const root = document.documentElement;
const asked = new URLSearchParams(location.search).get("theme");
if (asked === "light" || asked === "dark") root.dataset.theme = asked;
document.getElementById("theme").onclick = () => {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
};

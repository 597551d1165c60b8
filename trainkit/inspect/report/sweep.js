
// Several runs beside each other: the table, which of them stand out, and what was varied against
// what came out.
const goal = { metric: 0, low: metrics.length ? metrics[0].is_low : true };
const goalName = () => metrics[goal.metric]?.name ?? "";
const bestOf = (run) => metrics[goal.metric]?.[goal.low ? "low" : "high"][run] ?? null;

// The runs by their best value; those without one come last.
function ranked() {
  const value = (run) => bestOf(run)?.[0] ?? (goal.low ? Infinity : -Infinity);
  return data.runs.map((_, run) => run)
    .sort((a, b) => (value(a) === value(b) ? a - b : (value(a) - value(b)) * (goal.low ? 1 : -1)));
}
function chooseBest() {
  chosen.clear();
  const first = ranked().slice(0, MOST);
  for (const run of data.runs.length > MOST ? first : data.runs.keys()) choose(run);
  isByHand = false;
}
function pointAt(run) {
  if (run === pointed) return;
  pointed = run;
  repoint();
}

class RunTable {
  constructor(place) {
    this.sorted = { column: 1, down: !goal.low };
    const bar = node("div", "tools", place);
    if (metrics.length) {
      choice(bar, "best by", metrics.map((m, index) => [index, m.name]), (index) => {
        this.aim(+index, metrics[index].is_low);
      }).id = "metric";
      this.direction = choice(bar, "", [["low", "lowest"], ["high", "highest"]], (which) => {
        this.aim(goal.metric, which === "low");
      });
      this.direction.setAttribute("aria-label", "what is best");
      this.direction.value = goal.low ? "low" : "high";
    }
    if (data.runs.length > MOST) {
      const button = node("button", "", bar, `highlight the best ${MOST}`);
      button.onclick = () => { chooseBest(); redraw(); };
    }
    const most = data.runs.length > MOST ? `, at most ${MOST} at once` : "";
    node("p", "hint", place, `Click a run to highlight it${most}; click a heading to sort.`);
    this.table = node("table", "runs", node("div", "wide tall", place));
    this.table.onpointerleave = () => pointAt(null);
  }
  aim(metric, low) {
    Object.assign(goal, { metric, low });
    this.direction.value = low ? "low" : "high";
    this.sorted = { column: 1, down: !low };
    if (!isByHand) chooseBest();
    redraw();
  }
  // Each column with its values by run, and how they are written.
  columns() {
    const runs = data.runs, plain = (values) => {
      const numbers = values.filter((v) => typeof v === "number"), written = texts(numbers);
      return values.map((v) => (typeof v === "number" ? written[numbers.indexOf(v)] : v ?? ""));
    };
    const each = (write) => (values) => values.map((v) => (v === null ? "" : write(v)));
    const whole = each((v) => v.toLocaleString("en"));
    const figure = (title, read, write) =>
      ({ title, values: runs.map((r) => read(r) ?? null), write });
    const best = runs.map((_, run) => bestOf(run)), last = metrics[goal.metric]?.last ?? [];
    const counts = [figure("resumes", (r) => r.resumes.length),
      figure("skipped steps", (r) => r.skipped)];
    const found = [
      { title: `best ${goalName()}`, values: best.map((b) => b && b[0]) },
      { title: "at step", values: best.map((b) => b && b[1]), write: whole },
      ...data.varied.map(({ name, values }) => ({ title: name, values })),
      figure("running time", (r) => r.seconds, each(duration)),
      { title: `last ${goalName()}`, values: last.map((b) => b && b[0]) },
      figure("steps", (r) => r.counters.step, whole),
      figure("epochs", (r) => r.counters.epoch),
      figure("samples", (r) => r.counters.samples, whole),
      figure("goodput", (r) => r.goodput, each((v) => `${(100 * v).toFixed(1)} %`)),
      ...counts.filter(({ values }) => values.some((v) => v)),
      figure("ended by", (r) => r.ended),
    ];
    return [{ title: "run", values: runs.map((r) => r.name) },
      ...found.filter((column) => column.values.some((v) => v !== null && v !== ""))]
      .map((column) => ({ ...column, texts: (column.write ?? plain)(column.values) }));
  }
  order(columns) {
    const values = columns[this.sorted.column]?.values ?? [], sign = this.sorted.down ? -1 : 1;
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true }));
    return data.runs.map((_, run) => run).sort((a, b) => {
      const [x, y] = [values[a] ?? null, values[b] ?? null];
      if (x === null || y === null) return (x === null) - (y === null) || a - b;
      return sign * compare(x, y) || a - b;
    });
  }
  draw() {
    const columns = this.columns(), buttons = () => [...this.table.querySelectorAll("button")];
    const focused = buttons().indexOf(document.activeElement);
    this.table.replaceChildren();
    const head = node("tr", "", node("thead", "", this.table));
    columns.forEach((column, index) => {
      const isNumber = column.values.some((v) => typeof v === "number");
      const cell = node("th", isNumber ? "number" : "", head), { down } = this.sorted;
      const isSorted = index === this.sorted.column;
      if (isSorted) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      node("button", "", cell, column.title).onclick = () => {
        this.sorted = { column: index, down: isSorted && !down };
        this.draw();
      };
    });
    this.rows = new Map();
    const body = node("tbody", "", this.table);
    for (const run of this.order(columns)) {
      const row = node("tr", chosen.has(run) ? "chosen" : "", body);
      columns.forEach(({ values, texts: written }, index) => {
        const isNumber = typeof values[run] === "number";
        const cell = node(index ? "td" : "th", isNumber ? "number" : "", row);
        const inner = index ? cell : node("button", "", cell);
        if (!index && chosen.has(run)) swatch(lookOf(run), inner);
        node("span", "", inner, written[run]).title = written[run];
      });
      row.firstChild.firstChild.setAttribute("aria-pressed", chosen.has(run));
      row.onclick = () => chooseByHand(run);
      row.onpointerenter = () => pointAt(run);
      this.rows.set(run, row);
    }
    buttons()[focused]?.focus({ preventScroll: true });
    this.point();
  }
  point() { this.rows.forEach((row, run) => row.classList.toggle("pointed", run === pointed)); }
}

// The names of the runs that stand out, above the charts and in sight while one scrolls.
class Names {
  constructor() {
    this.place = node("div", "names", tools.parentElement);
    tools.after(this.place);
    const label = node("label", "", tools, "other runs"), box = node("input", "", label);
    Object.assign(box, { type: "checkbox", checked: true });
    box.onchange = () => { showOthers = box.checked; redraw(); };
  }
  draw() {
    const focused = [...this.place.children].indexOf(document.activeElement);
    this.place.replaceChildren();
    this.buttons = new Map();
    const few = data.runs.length <= MOST;
    const runs = few ? data.runs.keys() : ranked().filter((run) => chosen.has(run));
    for (const run of runs) {
      const button = node("button", chosen.has(run) ? "" : "off", this.place);
      swatch(lookOf(run), button);
      node("span", "", button, data.runs[run].name);
      button.setAttribute("aria-pressed", chosen.has(run));
      button.onclick = () => chooseByHand(run);
      button.onpointerenter = () => pointAt(run);
      button.onpointerleave = () => pointAt(null);
      this.buttons.set(run, button);
    }
    const told = `${chosen.size} of ${data.runs.length} runs highlighted`;
    if (!few) node("small", "", this.place, told);
    this.place.children[focused]?.focus({ preventScroll: true });
    this.point();
  }
  point() {
    this.buttons.forEach((button, run) => button.classList.toggle("pointed", run === pointed));
  }
}

// ---- What was varied against what came out ----

const MOST_WORDS = 12; // different texts on an axis
const isDrawable = ({ values }) => {
  const known = new Set(values.filter((v) => v !== null));
  const areNumbers = [...known].every((v) => typeof v === "number");
  return known.size > 1 && (areNumbers || known.size <= MOST_WORDS);
};
// Ends that hold all values but those far from the most, so that one run does not flatten the rest.
function usualEnds(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (share) => sorted[Math.floor(share * (sorted.length - 1))];
  const [first, third] = [at(0.25), at(0.75)];
  const space = 3 * (third - first) || Infinity;
  return range(sorted.filter((v) => v >= first - space && v <= third + space));
}
// Where values lie between 0 and 1, and the ticks: plain, by decades, or one for each text. What is
// beyond the ends lies at the edge.
function scaleOf(values, endsOf = range) {
  const known = [...new Set(values.filter((v) => v !== null))];
  if (known.every((v) => typeof v === "number")) {
    const ends = endsOf(known), log = ends[0] > 0 && ends[1] / ends[0] >= 20;
    const [low, high] = widened(log ? ends.map(Math.log10) : ends);
    const marks = known.length <= 5 && endsOf === range
      ? texts(known).map((text, index) => [known[index], text])
      : (log ? logTicks : axisTicks)(low, high, 4);
    const place = (v) => ((log ? Math.log10(v) : v) - low) / (high - low);
    const isBeyond = (v) => v < ends[0] || v > ends[1];
    const within = (v) => (isBeyond(v) ? Number(v > ends[1]) : place(v));
    return { marks, areFew: known.length <= 5, isBeyond, place: within };
  }
  const words = known.map(String).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const place = (v) => (words.indexOf(String(v)) + 0.5) / words.length;
  return { marks: words.map((word) => [word, word]), areFew: true, isBeyond: () => false, place };
}
// The ticks that are not too close to each other.
function apart(scale, least) {
  const found = [], marks = scale.marks.map(([value, text]) => [scale.place(value), text]);
  for (const mark of marks.sort((a, b) => a[0] - b[0])) {
    if (!found.length || mark[0] - found.at(-1)[0] >= least) found.push(mark);
  }
  return found;
}
const arrow = (share) => (share ? "\u2191" : "\u2193");
const clipped = (text, most) =>
  (text.length > most ? `${text.slice(0, Math.max(1, most - 1))}\u2026` : text);
const goalValues = () => data.runs.map((_, run) => bestOf(run)?.[0] ?? null);
const cellText = (value) => (typeof value === "number" ? short(value, 6) : value ?? "");

// One parameter against the best value; a run can be pointed at.
class Scatter {
  constructor(place, parameter) {
    Object.assign(this, { place, parameter });
    node("figcaption", "", place, parameter.name);
    const name = `${parameter.name} against the metric`;
    this.svg = make("svg", { class: "plot", role: "img", "aria-label": name }, place);
    this.tip = new Tip(place);
    const at = (event) => {
      const box = this.svg.getBoundingClientRect();
      return this.runAt(event.clientX - box.left, event.clientY - box.top);
    };
    this.svg.onpointermove = (event) => { this.owns = true; pointAt(at(event)); };
    this.svg.onpointerleave = () => { this.owns = false; pointAt(null); };
    this.svg.onclick = (event) => {
      const run = at(event);
      if (run !== null) chooseByHand(run);
    };
    new ResizeObserver(() => this.draw()).observe(place);
  }
  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight, results = goalValues();
    if (!width) return;
    this.svg.replaceChildren();
    const across = scaleOf(this.parameter.values), up = scaleOf(results, usualEnds);
    const rows = apart(up, 0.09);
    const left = 14 + 6.3 * Math.max(3, ...rows.map(([, text]) => text.length));
    const x = (v, run) => left + across.place(v) * (width - left - right)
      + (across.areFew ? 18 * ((run * 0.618) % 1) - 9 : 0); // beside each other, not one over all
    const y = (v) => height - 24 - up.place(v) * (height - 24 - top_);
    for (const [at, text] of rows) {
      const line = height - 24 - at * (height - 24 - top_);
      make("line", { class: "grid", x1: left, x2: width - right, y1: line, y2: line }, this.svg);
      make("text", { x: left - 6, y: line + 4, "text-anchor": "end" }, this.svg, text);
    }
    const columns = apart(across, 0.14), most = (width - left) / Math.max(1, columns.length) / 6.5;
    for (const [at, text] of columns) {
      make("text", { x: left + at * (width - left - right), y: height - 6,
        "text-anchor": "middle" }, this.svg, clipped(text, most));
    }
    this.places = this.parameter.values.flatMap((v, run) =>
      (v === null || results[run] === null ? [] : [[run, x(v, run), y(results[run])]]));
    const isChosen = ([run]) => chosen.has(run);
    for (const [run, px, py] of [...this.places].sort((a, b) => isChosen(a) - isChosen(b))) {
      const isLit = chosen.has(run);
      const kind = isLit ? "dot" : "dot other", style = `--c:${lookOf(run).color}`;
      if (up.isBeyond(results[run])) { // where a dot would name a wrong value
        make("text", { class: `beyond ${kind}`, style, x: px, y: py + 5 }, this.svg,
          arrow(up.place(results[run])));
      } else make("circle", { class: kind, style, cx: px, cy: py, r: isLit ? 5 : 3.5 }, this.svg);
    }
    this.overlay = make("g", {}, this.svg);
    this.point();
  }
  runAt(px, py) {
    const away = ([, x, y]) => Math.hypot(x - px, y - py);
    const near = this.places.filter((p) => away(p) < 18).sort((a, b) => away(a) - away(b));
    return near.length ? near[0][0] : null;
  }
  point() {
    if (!this.overlay) return;
    this.overlay.replaceChildren();
    this.tip.hide();
    const found = this.places.find(([run]) => run === pointed);
    if (!found) return;
    const [run, x, y] = found;
    make("circle", { class: "ring", cx: x, cy: y, r: 8 }, this.overlay);
    if (!this.owns) return;
    const rows = [[this.parameter.name, this.parameter.values[run]], [goalName(), bestOf(run)[0]]]
      .map(([name, value]) => ({ name, text: cellText(value) }));
    this.tip.show(data.runs[run].name, rows, x, y + 40);
  }
}

if (several) {
  views.push(new RunTable(document.getElementById("runs")));
  if (tools) views.push(new Names());
  const place = document.getElementById("parameters"), drawable = data.varied.filter(isDrawable);
  if (place && metrics.length && drawable.length) {
    node("p", "hint", place,
      "Each dot is a run at its best value. An arrow: a value far from the others, off the scale.");
    const grid = node("div", "charts scatter", place);
    for (const parameter of drawable) {
      views.push(new Scatter(node("figure", "chart", grid), parameter));
    }
    const rest = data.varied.filter((parameter) => !isDrawable(parameter)).map(({ name }) => name);
    const told = `Too many different values to draw: ${rest.join(", ")}.`;
    if (rest.length) node("p", "hint", place, told);
  } else if (place) {
    node("p", "hint", place, metrics.length
      ? "No setting that could be drawn differs between these runs." : "No metric was logged yet.");
  }
  chooseBest();
  setAxis("step");
}

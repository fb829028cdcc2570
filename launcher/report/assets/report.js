// The curves of a report: what uPlot is given, and what the controls do. Data and words come from the page.
(() => {
  "use strict";
  const source = document.getElementById("curves-data");
  if (!source) return;
  const { runs, panels } = JSON.parse(source.textContent);
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const COLOURS = 8;
  const HEIGHT = 208;
  const AXIS = 54;

  // ---- what the x axis shows: where each row of a run stands on it, NaN where that is unknown
  let mode = "step";
  const summed = (values) => {
    let sum = 0;
    return values.map((value) => { sum += value ?? 0; return sum; });
  };
  const places = {
    step: (run) => run.steps,
    tokens: ({ columns }) => {
      if (columns.tokens) return summed(columns.tokens);
      // what TRL logs is a sum already, of some steps
      return columns.num_tokens && columns.num_tokens.map((value) => value ?? NaN);
    },
    time: ({ columns }) => columns.seconds && summed(columns.seconds),
  };
  const placed = new Map();
  const placesOf = (run) => {
    const key = `${mode} ${runs.indexOf(run)}`;
    if (!placed.has(key)) placed.set(key, places[mode](run) ?? run.steps.map(() => NaN));
    return placed.get(key);
  };

  // ---- one x axis for all charts of the same runs: every place of each, sorted
  const axes = new Map();
  const axisOf = (panel) => {
    const key = `${mode} ${panel.runs.join()}`;
    if (!axes.has(key)) {
      const members = panel.runs.map((r) => placesOf(runs[r]));
      const first = members[0];
      const same = members.every((own) => own.length === first.length && own.every((x, i) => x === first[i]));
      const steps = same && mode === "step" ? first
        : [...new Set(members.flat().filter((x) => !Number.isNaN(x)))].sort((a, b) => a - b);
      const sync = uPlot.sync(`steps-${key}`);
      axes.set(key, { steps, place: new Map(steps.map((step, i) => [step, i])), sync });
    }
    return axes.get(key);
  };

  // undefined: nothing was logged there, the line goes on; null: it was not finite, the line breaks
  const aligned = ({ steps, place }, run, name, breaks) => {
    const column = new Array(steps.length);
    const values = run.columns[name];
    const own = placesOf(run);
    own.forEach((x, i) => {
      if (values[i] !== null && place.has(x)) column[place.get(x)] = values[i];
    });
    if (breaks) broken(run).forEach((x) => { column[place.get(x)] = null; });
    return column;
  };

  // where on the x axis a run was not finite
  const broken = (run) => {
    const own = placesOf(run);
    const bad = new Set(run.nonfinite);
    return own.filter((x, i) => bad.has(run.steps[i]) && !Number.isNaN(x));
  };

  const smoothed = (column, weight) => {
    let mean = 0, share = 0;
    return column.map((value) => {
      if (value === undefined || value === null) return value;
      mean = weight * mean + (1 - weight) * value;
      share = weight * share + (1 - weight);
      return mean / share;
    });
  };

  // ---- numbers as people read them
  const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const exponent = (value, digits) => value.toExponential(digits).replace(/\.?0+e/, "e").replace("e+", "e");
  const shown = (value) => {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-3 || size >= 1e9) return exponent(value, 3);
    return size >= 1e3 ? grouped.format(value) : String(Number(value.toPrecision(4)));
  };
  const ticks = (u, splits) => {
    const most = Math.max(...splits.filter((s) => s !== null).map(Math.abs));
    return splits.map((split) => {
      if (split === null) return "";
      if (split === 0) return "0";
      if (most < 1e-3 || most >= 1e9) return exponent(split, 2);
      if (most >= 1e6) return `${Number((split / 1e6).toPrecision(4))}M`;
      if (most >= 1e4) return `${Number((split / 1e3).toPrecision(4))}k`;
      return String(Number(split.toPrecision(5)));
    });
  };

  const clock = (seconds) => {
    const whole = Math.round(seconds);
    const pad = (value) => String(value).padStart(2, "0");
    return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
  };
  const short = (value) => {
    for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
      if (value >= size) return `${Number((value / size).toPrecision(4))}${letter}`;
    }
    return String(value);
  };
  const named = {
    step: { label: "optimizer step", tick: (x) => (x % 1 ? "" : grouped.format(x)), at: (x) => `step ${grouped.format(x)}` },
    tokens: { label: "tokens", tick: short, at: (x) => `${short(x)} tokens` },
    time: { label: "training time", tick: clock, at: clock },
  };
  // steps of an axis of time that a clock has
  const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400,
    172800, 432000, 864000];

  // ---- state
  const hidden = new Set();
  let logarithmic = false;
  let weight = 0;
  const charts = [];

  // a logarithmic axis: powers of ten with 2 and 5, of less than two of them what a plain axis would have
  const decades = (u, axis, low, high) => {
    const found = [];
    if (high / low < 20) {
      const rough = (high - low) / 5;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= rough);
      for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
      return found;
    }
    const digits = high / low < 2000 ? [1, 2, 5] : [1];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      digits.forEach((digit) => {
        const value = digit * 10 ** power;
        if (value >= low && value <= high) found.push(value);
      });
    }
    return found;
  };
  const logTicks = (u, splits) => splits.map((split) => (split === null ? "" : String(Number(split.toPrecision(3)))));

  // what the y axis spans: room above and below, but from zero where less makes no sense
  const span = (floor) => (u, low, high) => {
    if (floor === "share") return [0, 1];
    if (low === null || high === null) return [0, 1];
    if (low === high) {
      const room = Math.abs(low) * 0.1 || 1;
      return floor === "zero" ? [Math.min(0, low), high + room] : [low - room, high + room];
    }
    const room = (high - low) * 0.06;
    return floor === "zero" ? [Math.min(0, low - (low < 0 ? room : 0)), high + room] : [low - room, high + room];
  };

  // the most that a few spikes leave of the scale: twice what 95 of 100 values stay below; null if nothing is beyond
  const ceiling = (columns) => {
    const values = columns.flatMap((column) => column.filter((v) => v !== undefined && v !== null));
    if (values.length < 20) return null;
    values.sort((a, b) => a - b);
    const most = 2 * values[Math.floor(0.95 * (values.length - 1))];
    return most > 0 && values[values.length - 1] > 2 * most ? most : null;
  };

  // whether two curves cannot be told apart: within a pixel of each other wherever both are
  const coincide = (one, other, range) => {
    let common = 0;
    for (let i = 0; i < one.length; i++) {
      const known = one[i] !== undefined && one[i] !== null && other[i] !== undefined && other[i] !== null;
      if (known && Math.abs(one[i] - other[i]) > range / HEIGHT) return false;
      common += known;
    }
    return common > 0;
  };

  const curvesOf = (panel) => panel.lines.flatMap((line) => panel.runs.flatMap((r) => {
    const run = runs[r];
    const name = line.columns.find((column) => run.columns[column]);
    return name === undefined ? [] : [{ run, r, line, name }];
  }));

  // the nearest value that this curve has; none before its first step and after its last
  const bounds = new WeakMap();
  const nearest = (column, at) => {
    if (!bounds.has(column)) {
      const known = (v) => v !== undefined;
      bounds.set(column, [column.findIndex(known), column.findLastIndex(known)]);
    }
    const [first, last] = bounds.get(column);
    if (first < 0 || at < first || at > last) return null;
    for (let off = 0; ; off++) {
      if (column[at - off] !== undefined) return at - off;
      if (column[at + off] !== undefined) return at + off;
    }
  };

  const marks = (panel, curves) => (u) => {
    if (!panel.marks) return;
    const { ctx, bbox } = u;
    const size = 3.5 * devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = colour("--fail");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const { run, r } of curves) {
      if (hidden.has(r)) continue;
      for (const step of broken(run)) {
        if (step < u.scales.x.min || step > u.scales.x.max) continue;
        const x = u.valToPos(step, "x", true), y = bbox.top + size * 2;
        ctx.beginPath();
        ctx.moveTo(x - size, y - size); ctx.lineTo(x + size, y + size);
        ctx.moveTo(x - size, y + size); ctx.lineTo(x + size, y - size);
        ctx.stroke();
      }
    }
    ctx.restore();
  };

  // what is off the scale: a triangle at the top, in the colour of its run
  const spikes = (chart) => (u) => {
    if (chart.top === null) return;
    const { ctx, bbox } = u;
    const size = 4 * devicePixelRatio;
    ctx.save();
    chart.curves.forEach(({ r }, c) => {
      if (hidden.has(r)) return;
      ctx.fillStyle = colour(`--c${r % COLOURS}`);
      chart.raw[c].forEach((value, i) => {
        const step = chart.axis.steps[i];
        if (!(value > chart.top) || step < u.scales.x.min || step > u.scales.x.max) return;
        const x = u.valToPos(step, "x", true), y = bbox.top;
        ctx.beginPath();
        ctx.moveTo(x, y); ctx.lineTo(x - size, y + size * 1.6); ctx.lineTo(x + size, y + size * 1.6);
        ctx.fill();
      });
    });
    ctx.restore();
  };

  class Chart {
    constructor(panel) {
      this.panel = panel;
      this.axis = axisOf(panel);
      this.figure = byId(`panel-${panel.key}`);
      this.box = this.figure.querySelector(".plot");
      this.list = this.figure.querySelector(".readout");
      this.curves = curvesOf(panel);
      this.whole = !panel.clips;
      this.clip = document.createElement("button");
      this.clip.type = "button";
      this.clip.className = "clip";
      this.clip.hidden = true;
      this.clip.addEventListener("click", () => { this.whole = !this.whole; this.update(); });
      this.figure.querySelector("figcaption").append(this.clip);
      this.#readout();
      this.load();
    }

    // the columns on the x axis that is shown now
    load() {
      if (this.plot) {
        this.axis.sync.unsub(this.plot);
        this.plot.destroy();
        this.plot = undefined;
      }
      this.axis = axisOf(this.panel);
      this.raw = this.curves.map(({ run, name }) => aligned(this.axis, run, name, this.panel.marks));
      this.build();
    }

    // a logarithm has a place for what is above zero alone
    get log() {
      return logarithmic && this.panel.log && this.raw.some((column) => column.some((value) => value > 0));
    }

    // a schedule has no noise to be smoothed away
    get weight() { return this.panel.noisy ? weight : 0; }

    data() {
      const positive = (column) => (this.log ? column.map((value) => (value > 0 ? value : undefined)) : column);
      const smooth = this.raw.map((column) => (this.weight ? smoothed(column, this.weight) : []));
      return [this.axis.steps, ...this.raw.map(positive), ...smooth.map(positive)];
    }

    // the scale without a few spikes, and a button that says what is beyond it
    #fit() {
      const visible = this.raw.filter((_, c) => !hidden.has(this.curves[c].r));
      const limit = this.panel.clips && !this.log ? ceiling(visible) : null;
      this.top = this.whole ? null : limit;
      this.clip.hidden = limit === null;
      if (limit === null) return;
      let most = -Infinity, at = 0;
      visible.forEach((column) => column.forEach((value, i) => { if (value > most) { most = value; at = i; } }));
      this.clip.textContent = this.whole ? "leave spikes out"
        : `up to ${shown(most)} at ${named[mode].at(this.axis.steps[at])}: show`;
    }

    // how many visible curves a curve would hide
    #below(c) {
      if (hidden.has(this.curves[c].r)) return 0;
      const values = this.raw[c].filter((v) => v !== undefined && v !== null);
      const range = values.reduce((m, v) => Math.max(m, v), -Infinity) - values.reduce((m, v) => Math.min(m, v), Infinity);
      return this.raw.slice(0, c).filter((column, other) => !hidden.has(this.curves[other].r) &&
        coincide(this.raw[c], column, range)).length;
    }

    #style({ r, line }, over) {
      return {
        show: !hidden.has(r) && (!over || this.weight > 0),
        label: `${runs[r].name} ${line.label}`,
        stroke: () => colour(`--c${r % COLOURS}`),
        width: over ? 1.75 : this.weight ? 1 : 1.5,
        alpha: over || !this.weight ? 1 : 0.25,
        spanGaps: false,
        points: over ? { show: false } : { size: 4, space: 12 },
      };
    }

    build() {
      const { panel, curves } = this;
      const zoom = this.plot && { min: this.plot.scales.x.min, max: this.plot.scales.x.max };
      if (this.plot) { this.axis.sync.unsub(this.plot); this.plot.destroy(); }
      this.#fit();
      const below = curves.map((_, c) => this.#below(c));
      const dash = ({ r, line }, c) => {
        // what lies below shows through the gaps
        if (below[c]) return [6, 6 * below[c]];
        return line.second ? [5, 4] : r >= COLOURS ? [10, 3] : undefined;
      };
      const style = (curve, c, over) => ({ ...this.#style(curve, over), dash: dash(curve, c) });
      const range = span(panel.floor);
      const top = this.top;
      let scale = top === null ? range : (u, low) => [range(u, low, top)[0], top];
      if (this.log) scale = (u, low, high) => (low > 0 ? [low / 1.15, high * 1.15] : [0.1, 1]);
      const spread = this.log ? { distr: 3, range: scale } : { range: scale };
      const heights = this.log ? { splits: decades, filter: (u, splits) => splits } : {};
      const words = named[mode];
      const steps = mode === "time" ? { incrs: CLOCK_STEPS } : {};
      const axis = (extra) => ({
        stroke: () => colour("--soft"), font: "11px system-ui, sans-serif",
        grid: { stroke: () => colour("--grid"), width: 1 }, ticks: { show: false }, ...extra,
      });
      this.plot = new uPlot({
        width: this.width(), height: HEIGHT, padding: [8, 24, 0, 0],
        legend: { show: false },
        scales: {
          x: { time: false },
          y: spread,
        },
        axes: [
          axis({
            size: 26, gap: 4, space: 60, label: words.label, labelSize: 16, labelGap: 0,
            labelFont: "11px system-ui, sans-serif", ...steps,
            values: (u, splits) => splits.map((s) => (s === null ? "" : words.tick(s))),
          }),
          axis({ size: AXIS, gap: 6, space: 32, values: this.log ? logTicks : ticks, ...heights }),
        ],
        series: [{}, ...curves.map((c, i) => style(c, i, false)), ...curves.map((c, i) => style(c, i, true))],
        cursor: {
          y: false,
          sync: { key: this.axis.sync.key, setSeries: false, scales: ["x", null] },
          points: { size: 7, width: 1.5, fill: () => colour("--page") },
          dataIdx: (u, i, at) => (i > curves.length || i === 0 ? at : nearest(u.data[i], at)),
          drag: { x: true, y: false },
        },
        hooks: { setCursor: [() => this.#tell()], draw: [marks(panel, curves), spikes(this)] },
      }, this.data(), this.box);
      if (zoom && zoom.min !== null) this.plot.setScale("x", zoom);
    }

    width() { return Math.max(160, Math.floor(this.box.clientWidth)); }

    update() {
      this.items.forEach((item, r) => { item.hidden = hidden.has(r); });
      this.build();
      this.#tell();
    }

    // one entry a run, however many curves it has here
    #readout() {
      const entries = new Map();
      this.values = this.curves.map(({ r }) => {
        if (!entries.has(r)) {
          const item = document.createElement("li");
          const swatch = document.createElement("span");
          swatch.className = `swatch k${r % COLOURS}`;
          item.append(swatch);
          if (runs.length > 1) {
            const number = document.createElement("span");
            number.className = "no";
            number.textContent = r + 1;
            item.append(number);
          }
          item.title = runs[r].name;
          this.list.append(item);
          entries.set(r, item);
        } else {
          const between = document.createElement("span");
          between.className = "between";
          between.textContent = "/";
          entries.get(r).append(between);
        }
        const value = document.createElement("b");
        entries.get(r).append(value);
        return value;
      });
      this.items = entries;
    }

    #tell() {
      const plot = this.plot;
      if (!plot) return;
      const on = plot.cursor.left >= 0 && plot.cursor.idx !== null && plot.cursor.idx !== undefined;
      this.curves.forEach(({ run }, i) => {
        const column = this.raw[i];
        let at = on ? plot.cursor.idxs[i + 1] : column.findLastIndex((v) => v !== undefined && v !== null);
        const value = at === null || at < 0 ? undefined : column[at];
        const bad = on && this.panel.marks && broken(run).includes(this.axis.steps[plot.cursor.idx]);
        this.values[i].textContent = bad || value === null ? "not finite" : value === undefined ? "–" : shown(value);
        this.values[i].classList.toggle("bad", bad);
      });
      byId("at").textContent = on ? named[mode].at(this.axis.steps[plot.cursor.idx]) : "last step";
    }

  }

  // ---- controls
  const each = (selector, act) => document.querySelectorAll(selector).forEach(act);
  const redraw = () => charts.forEach((chart) => chart.plot.redraw(false));
  const fit = () => charts.forEach((chart) => {
    const width = chart.width();
    if (width !== chart.plot.width) chart.plot.setSize({ width, height: HEIGHT });
  });
  const reset = () => charts.forEach((chart) => {
    const { steps } = chart.axis;
    chart.plot.setScale("x", { min: steps[0], max: steps[steps.length - 1] });
  });
  const draw = (panel) => { charts.push(new Chart(panel)); charts[charts.length - 1].update(); };

  each("input[data-run]", (box) => {
    const r = Number(box.dataset.run);
    const apply = () => {
      if (box.checked) hidden.delete(r); else hidden.add(r);
      charts.forEach((chart) => chart.update());
    };
    box.addEventListener("change", apply);
    if (!box.checked) hidden.add(r);
  });
  const smooth = (value) => {
    weight = value;
    byId("smoothing").value = value;
    byId("smoothing-is").textContent = value.toFixed(2);
  };
  byId("smoothing").addEventListener("input", (event) => {
    smooth(Number(event.target.value));
    charts.forEach((chart) => chart.update());
  });
  // noise of thousands of steps is a band: begin with a line through it
  const longest = Math.max(...runs.map((run) => run.steps.length));
  smooth(longest > 3000 ? 0.98 : longest > 600 ? 0.9 : 0);
  byId("reset").addEventListener("click", reset);
  byId("log-y").addEventListener("click", (event) => {
    logarithmic = !logarithmic;
    event.currentTarget.setAttribute("aria-pressed", String(logarithmic));
    charts.forEach((chart) => chart.update());
  });
  // what no run knows is no choice
  [...byId("x-axis").options].forEach((option) => {
    if (!runs.some((run) => places[option.value](run))) option.remove();
  });
  byId("x-axis").addEventListener("change", (event) => {
    mode = event.target.value;
    charts.forEach((chart) => { chart.load(); chart.update(); });
  });

  // ---- all curves as a file: a row a step of each run
  const quoted = (value) => {
    const text = String(value ?? "");
    // a spreadsheet must not take a name for a formula
    const plain = typeof value === "string" && /^[=+\-@\t]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
  };
  const table = () => {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.columns)))];
    const lines = [["run", "step", ...names]];
    runs.forEach((run) => run.steps.forEach((step, i) => {
      lines.push([run.name, step, ...names.map((name) => run.columns[name]?.[i])]);
    }));
    return lines.map((line) => `${line.map(quoted).join(",")}\r\n`).join("");
  };
  byId("csv").addEventListener("click", (event) => {
    // made when it is wanted: it is as large as all curves
    const link = event.currentTarget;
    link.href = URL.createObjectURL(new Blob([table()], { type: "text/csv" }));
    link.download = `${document.title.replace(/[^\w.-]+/g, "-")}.csv`;
    setTimeout(() => { URL.revokeObjectURL(link.href); link.href = "#curves"; link.removeAttribute("download"); }, 60000);
  });

  panels.filter((panel) => !panel.folded).forEach(draw);
  each(".more-curves", (more) => {
    const open = () => {
      if (!more.open || more.dataset.drawn) return;
      more.dataset.drawn = "yes";
      panels.filter((panel) => panel.folded && more.contains(byId(`panel-${panel.key}`))).forEach(draw);
    };
    more.addEventListener("toggle", open);
    open();
  });

  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(fit); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // paper is narrower than most screens
  addEventListener("beforeprint", () => {
    charts.forEach((chart) => chart.plot.setSize({ width: 330, height: HEIGHT }));
  });
  addEventListener("afterprint", fit);
  requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("drawn")));
})();

// The command, to paste.
document.querySelectorAll("button[data-copy]").forEach((button) => {
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copy).textContent;
    try { await navigator.clipboard.writeText(text); button.textContent = "copied"; }
    catch { getSelection().selectAllChildren(document.getElementById(button.dataset.copy)); }
  });
});

// What a log ends with is what one looks for.
document.querySelectorAll(".banner pre").forEach((pre) => { pre.scrollTop = pre.scrollHeight; });

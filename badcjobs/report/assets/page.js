/* The page of a report: tables that sort, filter and unfold; charts that zoom, for one device or all. */
"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, attributes = {}, text = "") => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  };
  const count = (many) => many.toLocaleString("en-US");
  const PRINTED = 1000; // rows: a longer table is printed as it is shown

  /* --- tables ------------------------------------------------------------------------------------------------ */

  function activate(table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const most = Number(table.dataset.fold);
    const state = { words: "", folded: rows.length > most, paper: false };
    const bar = make("div", { class: "bar" });
    const said = make("span", { role: "status", class: "said" });
    const unfold = make("button", { type: "button", class: "plain" });

    function apply() {
      const wanted = rows.filter((row) => !state.words || row.textContent.toLowerCase().includes(state.words));
      const folded = state.folded && !state.paper;
      const shown = new Set(folded ? wanted.slice(0, most) : wanted);
      for (const row of rows) row.hidden = !shown.has(row);
      said.textContent = state.words || folded ? `${count(shown.size)} of ${count(wanted.length)} rows` +
        (state.words ? ` that match (${count(rows.length)} in total)` : "") : `${count(rows.length)} rows`;
      unfold.textContent = state.folded ? `Show all ${count(wanted.length)}` : "Show fewer";
      unfold.hidden = wanted.length <= most;
    }

    function sort(column, header) {
      const down = header.getAttribute("aria-sort") !== "descending";
      for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => {
        const cell = row.cells[column];
        return cell.dataset.v === undefined ? cell.textContent : cell.dataset.v === "" ? null : Number(cell.dataset.v);
      };
      const compare = (a, b) => typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
      // Unknown values come last in both directions.
      const keyed = rows.map((row) => [value(row), row]);
      keyed.sort(([a], [b]) => a === null ? (b === null ? 0 : 1) : b === null ? -1 : down ? compare(b, a) : compare(a, b));
      rows.splice(0, rows.length, ...keyed.map(([, row]) => row));
      body.append(...rows);
      apply();
    }

    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const button = make("button", { type: "button" }, header.textContent);
      button.addEventListener("click", () => sort(column, header));
      header.replaceChildren(button);
    });
    if (rows.length > 8) {
      const label = make("label", {}, "Filter ");
      const input = make("input", { type: "search", "aria-controls": table.id });
      let later;
      input.addEventListener("input", () => {
        clearTimeout(later);
        later = setTimeout(() => { state.words = input.value.trim().toLowerCase(); apply(); }, 120);
      });
      label.append(input);
      unfold.addEventListener("click", () => { state.folded = !state.folded; apply(); });
      bar.append(label, said, unfold);
      table.parentElement.before(bar);
      // A printed table cannot be unfolded.
      const print = (paper) => { state.paper = paper && rows.length <= PRINTED; apply(); };
      addEventListener("beforeprint", () => print(true));
      addEventListener("afterprint", () => print(false));
      apply();
    }
  }

  /* --- charts ------------------------------------------------------------------------------------------------ */

  const GAP = 65535, STEPS = 60000;

  function unpack(text, Kind) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    return new Kind(bytes.buffer);
  }

  function columnsOf(series, metric, [bottom, top]) {
    const edges = unpack(series.edges, Uint32Array);
    const packed = unpack(series.figures[metric], Uint16Array);
    const many = edges.length - 1;
    const figure = (place) => packed[place] === GAP ? NaN : bottom + packed[place] / STEPS * (top - bottom);
    const found = [];
    for (let n = 0; n < many; n++) {
      const [low, mean, high] = [0, 1, 2].map((part) => figure(n + part * many));
      found.push({ left: series.begin + edges[n], right: series.begin + edges[n + 1], low, mean, high });
    }
    return found;
  }

  /* A step for every stretch; a stretch without readings breaks the line and the band. */
  function lineOf(columns) {
    const line = { x: [], y: [] };
    for (const { left, right, mean } of columns) { line.x.push(left, right); line.y.push(mean, mean); }
    return line;
  }

  function bandOf(columns) {
    const band = { x: [], y: [] };
    let back = [];
    const close = () => {
      for (const [x, y] of back.reverse()) { band.x.push(x); band.y.push(y); }
      if (back.length) { band.x.push(NaN); band.y.push(NaN); }
      back = [];
    };
    for (const one of columns) {
      if (Number.isNaN(one.low)) { close(); continue; }
      band.x.push(one.left, one.right); band.y.push(one.high, one.high);
      back.push([one.left, one.low], [one.right, one.low]);
    }
    close();
    return band;
  }

  function duration(ms) {
    const seconds = Math.round(ms / 1000);
    if (seconds < 60) return `${seconds} s`;
    const pad = (value) => String(value).padStart(2, "0");
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${pad(seconds % 60)} s`;
    const minutes = Math.round(seconds / 60);
    return `${Math.floor(minutes / 60)} h ${pad(minutes % 60)} min`;
  }

  function activateCharts(doc, sent) {
    const named = (name) => doc.get_model_by_name(name);

    const runs = new Map(Object.keys(sent.states).map((state) => {
      const source = named(`runs-${state}`);
      return [state, { source, ...Object.fromEntries(source.data instanceof Map ? source.data : Object.entries(source.data)) }];
    }));

    /* One row per device and task, or one row per device with its tasks one after another. */
    function arrange(by) {
      const cards = by === "cards";
      const names = cards ? sent.cards.names : sent.rows.map(([short]) => short);
      const shorten = (name) => window.innerWidth < 600 ? name.replace(/^.*_/, "") : name;
      named("device-names").major_label_overrides = new Map(names.map((name, row) => [row, shorten(name)]));
      for (const [state, { source, y, left, right }] of runs) {
        const device = Array.from(y, (row) => sent.rows[row][1]);
        const lasted = Array.from(left, (from, n) => duration(right[n] - from));
        const place = cards ? Array.from(y, (row) => sent.cards.of[row]) : y;
        source.data = { y: place, left, right, device, lasted, state: device.map(() => sent.states[state]) };
      }
      allRows = { start: names.length - 0.5, end: -0.5 };
      rows.setv({ ...allRows, bounds: [-0.5, names.length - 0.5] });
    }

    /* The range of rows and the time range of the tasks. */
    function findTasks() {
      const found = new Map();
      for (const { y, left, right } of runs.values()) {
        for (let n = 0; n < y.length; n++) {
          const full = sent.rows[y[n]][1];
          const task = full.slice(0, full.lastIndexOf(" · device "));
          const one = found.get(task) ?? { from: left[n], to: right[n], rows: new Set() };
          one.from = Math.min(one.from, left[n]);
          one.to = Math.max(one.to, right[n]);
          one.rows.add(y[n]);
          found.set(task, one);
        }
      }
      return found;
    }

    function show(number) {
      const series = sent.series[number];
      for (const [metric, [bottom, top]] of Object.entries(sent.forms)) {
        const columns = columnsOf(series, metric, [bottom, top]);
        const known = columns.filter((one) => !Number.isNaN(one.mean));
        const hover = { floor: known.map(() => bottom), roof: known.map(() => top) };
        for (const part of ["left", "right", "low", "mean", "high"]) hover[part] = known.map((one) => one[part]);
        named(`${metric}-mean`).data = lineOf(columns);
        named(`${metric}-band`).data = bandOf(columns);
        named(`${metric}-hover`).data = hover;
      }
      return [series.begin, series.begin + unpack(series.edges, Uint32Array).at(-1)];
    }

    const times = named("time"), rows = named("rows");
    const whole = { start: times.start, end: times.end };
    let allRows = { start: rows.start, end: rows.end };

    function look(range, from, to, most) {
      const [low, high] = [Math.min(most.start, most.end), Math.max(most.start, most.end)];
      const width = Math.min(Math.max(to - from, range.min_interval ?? 0), high - low);
      const start = Math.min(Math.max((from + to - width) / 2, low), high - width);
      range.setv(most.start < most.end ? { start, end: start + width } : { start: start + width, end: start });
    }
    const scale = (by, shift) => {
      const width = times.end - times.start, middle = times.start + width * (0.5 + shift);
      look(times, middle - width * by / 2, middle + width * by / 2, whole);
    };
    const moves = {
      in: () => scale(0.5, 0), out: () => scale(2, 0), back: () => scale(1, -0.3), on: () => scale(1, 0.3),
      all: () => { times.setv(whole); rows.setv(allRows); },
    };
    const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "back", ArrowRight: "on", 0: "all", Home: "all" };
    for (const chart of $$(".chart[data-time]")) {
      chart.addEventListener("dblclick", moves.all);
      chart.addEventListener("keydown", (event) => {
        const move = event.ctrlKey || event.metaKey || event.altKey ? undefined : keys[event.key];
        if (move) { moves[move](); event.preventDefault(); }
      });
    }
    for (const button of $$("[data-move]")) button.addEventListener("click", moves[button.dataset.move]);

    const pick = $("#pick");
    if (pick) { // without telemetry there is nothing to select
      sent.series.forEach(({ name }, number) => pick.append(make("option", { value: number }, name)));
      pick.addEventListener("change", () => {
        const [from, to] = show(Number(pick.value));
        look(times, from - (to - from) * 0.02, to + (to - from) * 0.02, whole);
      });
    }
    const by = $("#by");
    // If devices served several tasks each, a row per task would be mostly empty.
    if (sent.cards.names.length * 2 <= sent.rows.length && sent.rows.length > 100) by.value = "cards";
    by.parentElement.hidden = sent.cards.names.length === sent.rows.length;
    by.addEventListener("change", () => arrange(by.value));
    const find = $("#find");
    if (find) {
      const tasks = findTasks();
      const names = [...tasks.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      $("#tasks-found").append(...names.map((name) => make("option", { value: name })));
      find.addEventListener("change", () => {
        const words = find.value.trim();
        const task = words && tasks.get(tasks.has(words) ? words : names.find((name) => name.includes(words)));
        if (!task) return moves.all();
        const places = [...task.rows].map((row) => by.value === "cards" ? sent.cards.of[row] : row);
        look(rows, Math.min(...places) - 4.5, Math.max(...places) + 4.5, allRows);
        look(times, task.from - (task.to - task.from) * 0.3, task.to + (task.to - task.from) * 0.3, whole);
      });
    }
    arrange(by.value);
    show(0);
  }

  /* Colours are defined in the style sheet; a canvas cannot read it, so they are set here. */
  function dress(doc) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const [ink, soft, line, curve] = [color("--ink"), color("--soft"), color("--line"), color("--curve")];
    for (const model of doc.all_models ?? doc._all_models.values()) {
      if (/Axis$/.test(model.type)) {
        model.setv({ major_label_text_color: soft, axis_label_text_color: soft, axis_line_color: line,
          major_tick_line_color: line });
      } else if (model.type === "Grid") {
        if (model.grid_line_color != null) model.setv({ grid_line_color: line });
      } else if (model.type === "Span") {
        model.setv({ line_color: ink });
      } else if (model.type === "Line") {
        model.setv({ line_color: curve });
      } else if (model.type === "Patch" || model.type === "Quad") {
        model.setv({ fill_color: curve });
      }
    }
    document.documentElement.dataset.charts = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }

  /* A narrow page has room for only a few times below a chart. */
  function spaceTicks(doc) {
    const narrow = matchMedia("(max-width: 600px)");
    const tickers = [...(doc.all_models ?? doc._all_models.values())].filter(({ type }) => type === "DatetimeTicker")
      .map((ticker) => [ticker, ticker.desired_num_ticks]);
    const space = () => {
      for (const [ticker, usual] of tickers) ticker.setv({ desired_num_ticks: narrow.matches ? 4 : usual });
    };
    space();
    narrow.addEventListener("change", space);
  }

  /* Each chart is one stop for the keyboard: ours, which has a name. Bokeh adds another one inside, which is removed. */
  function leaveOneStop(root) {
    for (const one of $$("*", root)) {
      if (one.shadowRoot) leaveOneStop(one.shadowRoot);
      if (root !== document && one.tabIndex === 0) one.tabIndex = -1;
    }
  }

  async function startCharts() {
    const data = $("#chart-data");
    if (!data || typeof Bokeh === "undefined") return;
    while (!Bokeh.documents.length) await new Promise((resolve) => setTimeout(resolve, 10));
    const doc = Bokeh.documents[0];
    // Control characters and those that turn text around are escaped.
    const sent = JSON.parse(data.textContent, (_key, value) => typeof value !== "string" ? value
      : value.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (sign) => `\\u${sign.codePointAt(0).toString(16).padStart(4, "0")}`));
    if (sent.series) activateCharts(doc, sent);
    dress(doc);
    spaceTicks(doc);
    leaveOneStop(document);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dress(doc));
  }

  $$("table[data-fold]").forEach(activate);
  /* A link to a folded part opens it. */
  const openPart = () => {
    const part = document.getElementById(location.hash.slice(1))?.querySelector(":scope > details");
    if (part) part.open = true;
  };
  addEventListener("hashchange", openPart);
  openPart();
  addEventListener("beforeprint", () => $$("details").forEach((one) => { one.open = true; }));
  startCharts().then(() => { document.documentElement.dataset.ready = "yes"; });
})();

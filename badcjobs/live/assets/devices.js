// The live page: charts with tooltips, one card per device, and the overview of all devices.
"use strict";

// --- charts ----------------------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function makeChart() {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("role", "img");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("viewBox", "0 0 100 100");
  for (const name of ["area", "line", "cursor"]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    svg.append(path);
  }
  return svg;
}

// A step without a reading is a gap in the line, not a zero.
function drawChart(svg, values, top) {
  const [area, line] = svg.children, last = Math.max(1, values.length - 1);
  const x = (i) => ((100 * i) / last).toFixed(2), y = (v) => (98 - (96 * Math.min(v, top)) / top).toFixed(2);
  let lines = "", areas = "", begun = -1;
  const close = (i) => {
    if (begun >= 0 && begun === i) { // draw a single reading as wide as its step
      const height = y(values[i]), from = x(Math.max(0, i - 0.5)), to = x(values.length === 1 ? 1 : Math.min(last, i + 0.5));
      lines += `M${from} ${height}L${to} ${height}`;
      areas += `L${to} ${height}L${to} 98L${from} 98L${from} ${height}Z`;
    } else if (begun >= 0) areas += `L${x(i)} 98L${x(begun)} 98Z`;
    begun = -1;
  };
  values.forEach((value, i) => {
    if (!known(value)) return close(i - 1);
    lines += `${begun < 0 ? "M" : "L"}${x(i)} ${y(value)}`;
    areas += `${begun < 0 ? `M${x(i)} 98L` : "L"}${x(i)} ${y(value)}`;
    if (begun < 0) begun = i;
  });
  close(values.length - 1);
  line.setAttribute("d", lines);
  area.setAttribute("d", areas);
}

const CHARTS = [
  { name: "utilization", of: "utilization_percent", top: () => 100, big: true, words: shareWords },
  { name: "memory", of: "memory_used_bytes", top: (d, most) => d.memory_total_bytes || most,
    words: (v, d) => (known(v) && known(d.memory_total_bytes) ? `${fixed(v / GIB, 1)}/${fixed(d.memory_total_bytes / GIB, 1)} GiB` : memory(v)) },
  { name: "temperature", of: "temperature_c", top: (d, most) => Math.max(100, most), words: temperature },
  { name: "power", of: "power_w", top: (d, most) => d.power_limit_w || most,
    words: (v, d) => (known(v) && known(d.power_limit_w) ? `${fixed(v, 0)}/${fixed(d.power_limit_w, 0)} W` : power(v)) },
];

const MORE = [["sm_activity_percent", "SM activity"], ["sm_occupancy_percent", "SM occupancy"], ["encoder_percent", "encoder"], ["decoder_percent", "decoder"], ["fan_percent", "fan"]];

// The last reading, or the means after the task has ended: the last reading of an ended task is that of an idle device.
const shownOf = (device) => device.means || device.reading;

function valueOf(chart, device) {
  const value = shownOf(device)[chart.of];
  return (chart.big && device.means && known(value) ? "mean " : "") + chart.words(value, device);
}

function makeRow(chart) {
  const row = make("div", chart.big ? "row big" : "row");
  row.append(make("dt", "", chart.name), makeChart(), make("dd"));
  const svg = row.children[1];
  for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, (event) => {
    svg.at = [event.clientX, event.clientY];
    showTip(svg);
  });
  for (const kind of ["pointerleave", "pointercancel"]) svg.addEventListener(kind, hideTip);
  return row;
}

function updateRow(row, chart, device, trail) {
  const [name, svg, value] = row.children, values = (trail && trail[chart.of]) || [];
  const readings = values.filter(known), most = Math.max(1, ...readings);
  svg.shown = { chart, values, trail, device };
  row.classList.toggle("bare", !readings.length);
  drawChart(svg, values, chart.top(device, most));
  svg.setAttribute("aria-label", readings.length
    ? `${chart.name}, ${device.alive ? "last " : ""}${duration((trail.step_ms * values.length) / 1000)}: from ${chart.words(Math.min(...readings), {})} to ${chart.words(Math.max(...readings), {})}`
    : `${chart.name}: no readings`);
  setText(name, chart.big && device.load ? `${chart.name}, ${device.load}` : chart.name);
  setText(value, valueOf(chart, device));
  if (tipOf === svg) showTip(svg);
}

let tipOf = null; // the chart under the pointer

function showTip(svg) {
  const { chart, values = [], trail, device } = svg.shown || {};
  if (!values.length) return hideTip();
  if (tipOf !== svg) hideTip();
  tipOf = svg;
  const box = svg.getBoundingClientRect(), part = (svg.at[0] - box.left) / box.width;
  const i = Math.max(0, Math.min(values.length - 1, Math.round(part * (values.length - 1))));
  svg.children[2].setAttribute("d", `M${(100 * i) / Math.max(1, values.length - 1)} 0V100`);
  const tip = $("tip"), [value, when, where] = tip.children, from = trail.from_ms + i * trail.step_ms;
  setText(value, `${chart.name} ${known(values[i]) ? chart.words(values[i], {}) : "no reading"}`);
  setText(when, dayAndTime(from) + (trail.step_ms >= 1500 ? ` to ${clockTime(from + trail.step_ms)}` : ""));
  setText(where, `${deviceName(device)} on ${device.node}${device.task ? `, task ${taskLabel(device.task)}` : ""}`);
  tip.hidden = false;
  const left = svg.at[0] + 14 + tip.offsetWidth > innerWidth ? svg.at[0] - 14 - tip.offsetWidth : svg.at[0] + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(svg.at[1] + 14, innerHeight - tip.offsetHeight - 4))}px`;
}

function hideTip() {
  if (tipOf) tipOf.children[2].removeAttribute("d");
  tipOf = null;
  $("tip").hidden = true;
}

// --- devices ---------------------------------------------------------------------------------------------------------

const deviceName = (d) => `GPU ${known(d.index) ? d.index : d.token || "?"}`;
const taskLabel = (name) => (seen.tasks.get(name) || {}).label || name || "";
// It is unknown whether a silent task has ended.
const endState = (name) => ((seen.tasks.get(name) || {}).state === "silent" ? "silent" : "ended");
const fits = (words, filter) => filter.toLowerCase().split(/\s+/).every((word) => words.includes(word));
const orElse = (value, other) => (known(value) ? value : other);
const byShown = (name, sign, other) => (a, b) => sign * (orElse(shownOf(a)[name], other) - orElse(shownOf(b)[name], other));
const ORDERS = {
  // Devices that cannot be read, those of running tasks by name, then those of ended tasks, the latest first.
  place: (a, b) => !!b.trouble - !!a.trouble || b.alive - a.alive || (a.alive ? compare(a.key, b.key) : (b.read_at_ms || 0) - (a.read_at_ms || 0)),
  idle: byShown("utilization_percent", 1, 999),
  busy: byShown("utilization_percent", -1, -1),
  hot: byShown("temperature_c", -1, -1),
  full: (a, b) => orElse(b.memory_percent, -1) - orElse(a.memory_percent, -1),
};

// Messages do not contain the charts of ended tasks; they are requested for the visible devices, task by task.
const trails = new Map(), requested = new Set();

function trailOf(device) {
  if (device.trail) return device.trail;
  const mark = `${device.task} ${device.read_at_ms}`;
  if (!requested.has(mark)) {
    requested.add(mark);
    requestTrails(device.task);
  }
  return trails.get(device.key) || null;
}

async function requestTrails(task) {
  try {
    const answer = await fetch(`api/gpu/metrics?alive=false&task=${encodeURIComponent(task)}`);
    if (!answer.ok) return;
    for (const device of (await answer.json()).devices) trails.set(device.key, device.trail);
    drawSoon();
  } catch (error) {
    // The charts stay empty; the values are shown.
  }
}

function makeCard() {
  const card = make("article", "card"), head = make("div", "head"), now = make("p", "now");
  const rows = make("dl", "rows");
  rows.append(...CHARTS.map(makeRow));
  head.append(make("h3"), make("span", "model"));
  now.append(make("span"), make("span"), make("span"), make("span", "age"));
  card.append(head, make("p", "task"), make("p", "trouble"), rows, now, make("ul"));
  return card;
}

function updateCard(card, device) {
  const trail = device.task && !device.alive ? trailOf(device) : device.trail;
  if (card.device === device && card.trail === trail) return;
  card.device = device;
  card.trail = trail;
  const [head, task, trouble, rows, now, processes] = card.children;
  card.classList.toggle("ended", !device.alive);
  setText(head.children[0], `${deviceName(device)} on ${device.node}`);
  setText(head.children[1], device.name || "");
  setText(task, device.task ? `task ${taskLabel(device.task)}${device.alive ? "" : `, ${endState(device.task)}`}` : device.uuid || "");
  trouble.hidden = !device.trouble;
  setText(trouble, device.trouble || "");
  CHARTS.forEach((chart, i) => updateRow(rows.children[i], chart, device, trail));
  const more = MORE.filter(([of]) => device.alive && known(device.reading[of])).map(([of, name]) => `${name} ${shareWords(device.reading[of])}`);
  setText(now.children[2], more.join(", "));
  now.children[0].hidden = now.children[1].hidden = !device.task;
  const chunks = device.chunks || [];
  setText(now.children[0], chunks.length ? chunks[0] + (chunks.length > 1 ? ` and ${chunks.length - 1} more` : "") : device.alive ? "no chunk in progress" : Object.values(shownOf(device)).every((value) => !known(value)) ? "no readings" : device.means ? "means over the task" : "last readings");
  now.children[0].title = chunks.join("\n");
  setText(now.children[1], known(device.rate) ? `${count(device.chunks_done, "chunk")} done, ${speed(device.rate)} real time` : "");
  updateProcesses(processes, device.processes);
}

function drawAges() {
  const nowMs = seen.atMs + Date.now() - receivedAt;
  for (const card of $("cards").children) {
    const device = card.device, shown = device && device.alive && known(device.read_at_ms);
    setText(card.querySelector(".age"), shown ? `read ${duration(Math.max(0, nowMs - device.read_at_ms) / 1000)} ago` : "");
  }
}

function updateProcesses(list, processes) {
  list.hidden = !(processes && processes.length);
  sync(list, processes || [], (p) => String(p.pid), () => {
    const item = make("li");
    item.append(make("span"), make("span"));
    return item;
  }, (item, p) => {
    setText(item.children[0], `${p.program || "process"} ${p.pid}${p.user ? ` (${p.user})` : ""}`);
    setText(item.children[1], known(p.memory_used_bytes) ? memory(p.memory_used_bytes) : "");
  });
}

function drawDevices() {
  const filter = $("devices-filter").value.trim(), ended = $("devices-ended").checked || !anyAlive();
  const every = [...seen.devices.values()].filter((d) => ended || d.alive);
  const found = every.filter((d) => !filter || fits(
    [deviceName(d), d.node, d.name, d.task, taskLabel(d.task), d.uuid, ...(d.chunks || [])].join(" ").toLowerCase(), filter));
  const order = ORDERS[$("devices-order").value];
  found.sort(order);
  const shown = found.slice(0, wanted.cards);
  sync($("cards"), shown, (d) => d.key, makeCard, updateCard);
  $("ended-label").hidden = !seen.ofRun || !anyAlive();
  $("devices-bar").hidden = seen.devices.size < 2;
  $("ended-words").hidden = !seen.ofRun || anyAlive() || !seen.devices.size || Boolean(seen.reading);
  setText($("devices-many"), every.length === found.length ? whole(every.length) : `${whole(found.length)} of ${whole(every.length)}`);
  offerMore($("more-devices"), Math.min(MORE_CARDS, found.length - shown.length), "devices");
  drawWall(every);
  $("no-devices").hidden = found.length > 0;
  setText($("no-devices"), filter ? "No device matches." : "No devices yet.");
}

const anyAlive = () => [...seen.devices.values()].some((d) => d.alive);

// The words for the load, each with its class.
const GRADES = { idle: "b0", light: "b1", moderate: "b2", heavy: "b3", "no reading": "bx" };

// One square per device: the higher its utilization, the stronger its colour. The legend is below.
function drawWall(devices) {
  const wall = $("wall"), words = $("wall-words");
  wall.hidden = words.hidden = devices.length <= FEW_CARDS;
  if (wall.hidden) return;
  wall.classList.toggle("dense", devices.length > 800);
  const many = {};
  sync(wall, devices, (d) => d.key, () => document.createElement("i"), (square, d) => {
    const busy = d.trouble ? null : shownOf(d).utilization_percent;
    const grade = known(busy) ? d.load : "no reading";
    many[grade] = (many[grade] || 0) + 1;
    if (square.device === d) return;
    square.device = d;
    square.className = GRADES[grade];
    square.title = `${deviceName(d)} on ${d.node}${d.task ? `, task ${taskLabel(d.task)}` : ""}: ${known(busy) ? `${shareWords(busy)} utilization${d.means ? " on average" : ""} (${grade})` : grade}, ${known(d.read_at_ms) ? `read ${dayAndTime(d.read_at_ms)}` : "never read"}`;
  });
  sync(words, Object.entries(GRADES), ([grade]) => grade, ([, look]) => {
    const item = make("span");
    item.append(make("i", look), make("span"));
    return item;
  }, (item, [grade]) => setText(item.children[1], `${grade}: ${whole(many[grade] || 0)}`));
}

function offerMore(button, left, what) {
  button.hidden = left <= 0;
  setText(button, `Show ${whole(left)} more ${left === 1 ? what.slice(0, -1) : what}`);
}

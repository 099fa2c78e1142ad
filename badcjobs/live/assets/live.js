// The live page: receives messages from /ws and draws the page. The other scripts are loaded before this one.
"use strict";

// --- the header ----------------------------------------------------------------------------------------------------

function drawHeader() {
  const total = seen.total, name = seen.title.replace(/\/+$/, "").split("/").pop() || seen.title;
  setText($("title"), name);
  $("title").title = seen.title;
  const share = known(total.share) ? 100 * total.share : null;
  const percent = `${known(total.parts) ? "about " : ""}${progress((total.share * total.done) / (total.settled || 1))}`; // failed is not done
  document.title = `${known(share) ? `${percent} · ` : ""}${name} – badcjobs`;
  $("progress").hidden = !known(share);
  if (known(share)) {
    const [done, failed] = $("progress").firstElementChild.children;
    done.style.width = `${(share * total.done) / (total.settled || 1)}%`;
    failed.style.width = `${(share * total.failed) / (total.settled || 1)}%`;
    $("progress").setAttribute("aria-valuenow", share.toFixed(1));
    const parts = [(seen.verdict || {}).cost].filter(Boolean);
    if (total.failed) parts.push("hatched: failed");
    if (known(total.ends_at_ms)) parts.push(`done in about ${duration(Math.max(0, total.ends_at_ms - seen.atMs) / 1000)}, ${moment(total.ends_at_ms)}`);
    if (known(total.ended_at_ms)) parts.push(`ended ${moment(total.ended_at_ms)}`);
    $("progress-words").replaceChildren(make("b", "", percent), ` · ${parts.join(" · ")}`);
  }
  const found = seen.verdict;
  $("outcome").hidden = !found && !seen.reading;
  $("verdict").className = `verdict ${found ? found.state : "running"}`;
  setText($("verdict"), seen.reading || (found ? found.word : ""));
  setText($("counts"), found ? found.counts : "");
  drawTiles();
}

function drawTiles() {
  const total = seen.total, states = total.states || {}, tiles = [];
  if (seen.ofRun) {
    const tasks = `of ${whole(seen.tasks.size)}`;
    const [audio, unit] = audioTime(total.audio_done_s).split(" ");
    tiles.push([total.with_overlaps ? "audio done, with overlaps" : "audio done", audio, unit]);
    if (known(total.rate)) tiles.push(["× real time now", number(total.rate)]);
    else if (known(total.speed)) tiles.push(["× real time, while tasks ran", number(total.speed)]);
    // Without running devices, show the number of tasks in every state instead.
    const shown = total.devices ? ["running"] : STATES.filter((state) => states[state]);
    for (const state of shown) tiles.push([`tasks ${state}`, whole(states[state] || 0), tasks]);
  }
  if (!seen.ofRun || total.devices) tiles.push([seen.ofRun ? "active devices" : "devices", whole(total.devices)], ["utilization, mean", shareWords(total.utilization_percent), total.load],
    ["power", power(total.power_w)]);
  sync($("tiles"), tiles, ([word]) => word, ([word]) => {
    const tile = make("div");
    tile.append(make("dt", "", word), make("dd"));
    return tile;
  }, (tile, [, value, small]) => {
    const text = `${value}${small ? " " + small : ""}`;
    if (tile.children[1].textContent !== text) tile.children[1].replaceChildren(value, ...(small ? [" ", make("small", "", small)] : []));
  });
}

function drawStandstill() {
  const { standstill, go_on = [], states = {} } = seen.total, steps = (seen.verdict || {}).next || [], next = steps.map((step) => step.command);
  $("standstill-section").hidden = !standstill && !next.length;
  $("standstill").hidden = !standstill && !(steps[0] || {}).words;
  if (!standstill) setText($("standstill"), next.length ? `${steps[0].words}:` : "");
  if (!standstill) return sync($("go-on"), next, (line) => line, (line) => make("pre", "", line), setText);
  const unsure = states.silent ? "If the silent tasks are not running, resume with" : "Resume with";
  setText($("standstill"), `${standstill}.${go_on.length ? ` ${unsure}${go_on.length > 1 ? " one of these commands" : ""}:` : ""}`);
  sync($("go-on"), go_on, (line) => line, (line) => make("pre", "", line), setText);
}

function drawAlerts() {
  const alerts = seen.findings;
  $("no-alerts").hidden = alerts.length > 0;
  setText($("no-alerts"), seen.reading ? "None so far." : "None.");
  setText($("alerts-many"), alerts.length ? whole(alerts.length) : "");
  offerMore($("more-alerts"), alerts.length - wanted.alerts, "alerts");
  sync($("alerts"), alerts.slice(0, wanted.alerts), (a) => JSON.stringify([a.kind, a.task, a.device_uuid, a.device_index, a.started_at_ms]), () => {
    const item = make("li", "alert");
    item.append(make("b"), make("em"), make("span"), make("p"));
    return item;
  }, (item, a) => {
    item.className = `alert ${a.severity}`;
    const where = [a.task ? `task ${taskLabel(a.task)}` : "", a.node, known(a.device_index) ? `GPU ${a.device_index}` : ""];
    setText(item.children[0], a.severity === "critical" ? "problem" : a.severity); // as in the report
    setText(item.children[1], a.message);
    setText(item.children[2], [...where.filter(Boolean), `since ${moment(a.started_at_ms)}`].join(", "));
    setText(item.children[3], a.fix);
  });
  $("remarks-section").hidden = !seen.remarks.length;
  sync($("remarks"), seen.remarks, (r) => r, () => make("li"), setText);
}

let drawing = null;
function draw() {
  if (tipOf && !tipOf.isConnected) hideTip();
  drawHeader();
  drawStandstill();
  drawAlerts();
  drawDevices();
  drawAges();
  drawTasks();
}
function drawSoon() {
  if (drawing) return;
  drawing = setTimeout(() => { drawing = null; draw(); }, DRAW_MS);
}

// --- the connection --------------------------------------------------------------------------------------------------

let socket = null, receivedAt = 0, trouble = null, why = null;
const isOpen = () => socket && socket.readyState === WebSocket.OPEN;

function showLink() {
  const quiet = Date.now() - receivedAt > QUIET_MS;
  let state = "live", words = seen.total.ended_at_ms ? "the run has ended" : "live";
  if (!seen.atMs) [state, words] = ["connecting", why || trouble || (isOpen() ? "reading" : "connecting")];
  else if (trouble) [state, words] = ["stale", `stale since ${clockTime(seen.atMs)}: ${trouble}`];
  else if (quiet) [state, words] = ["stale", `stale since ${clockTime(receivedAt)}`];
  else if (!isOpen()) [state, words] = ["reconnecting", why || "reconnecting"];
  if (document.body.dataset.state !== state) document.body.dataset.state = state;
  setText($("link-words"), words);
  drawAges();
}

function receive(message) {
  const { event, data } = JSON.parse(message.data, plain);
  receivedAt = Date.now();
  why = null;
  if (event === "snapshot") takeAll(data);
  else if (event === "change") takeChange(data);
  else takeBeat(data);
  showLink();
}

function takeAll(data) {
  seen.title = data.title;
  seen.ofRun = data.of_run;
  seen.tasks = new Map();
  seen.devices = new Map();
  takeChange(data);
}

function takeChange(data) {
  trouble = null;
  seen.atMs = data.at_ms;
  seen.total = data.total;
  seen.verdict = data.verdict;
  seen.reading = data.reading;
  seen.findings = data.findings;
  seen.remarks = data.remarks;
  for (const name of data.gone_tasks || []) seen.tasks.delete(name);
  for (const key of data.gone_devices || []) seen.devices.delete(key);
  for (const task of data.tasks) seen.tasks.set(task.name, task);
  for (const device of data.devices) seen.devices.set(device.key, device);
  drawSoon();
}

function takeBeat(data) {
  trouble = data.trouble;
  if (known(data.at_ms)) seen.atMs = data.at_ms;
}

function connect() {
  const url = new URL("ws", location.href);
  url.protocol = url.protocol.replace("http", "ws");
  url.search = "";
  socket = new WebSocket(url);
  socket.addEventListener("open", showLink);
  socket.addEventListener("message", receive);
  socket.addEventListener("close", () => {
    setTimeout(reconnect, AGAIN_MS);
    showLink();
  });
}

async function reconnect() {
  try {
    const answer = await fetch("api/health");
    if (!answer.ok) why = (await answer.json()).error;
  } catch (error) {
    why = null;
  }
  connect();
}

makeHead();
for (const id of ["devices-filter", "devices-order", "devices-ended", "tasks-filter"]) $(id).addEventListener("input", draw);
$("more-alerts").addEventListener("click", () => { wanted.alerts = Infinity; draw(); });
$("more-devices").addEventListener("click", () => { wanted.cards += MORE_CARDS; draw(); });
$("wall").addEventListener("click", (event) => {
  const device = event.target.device;
  if (!device) return;
  $("devices-filter").value = device.task || device.uuid;
  draw();
});
$("more-tasks").addEventListener("click", () => { wanted.allRows = true; draw(); });
$("details-close").addEventListener("click", () => $("details").close());
setInterval(showLink, 1000);
connect();

// The live page: the table of array tasks, and the details of one.
"use strict";

// --- tasks -----------------------------------------------------------------------------------------------------------

const listed = (task, value) => (task.chunks ? value : null); // a task that has not started has no chunks yet
const COLUMNS = [
  { name: "task", text: true, of: (t) => [t.job_id, t.array_index], words: (t) => t.label },
  { name: "state", text: true, of: (t) => [STATES.indexOf(t.state), -t.failed] },
  { name: "node", text: true, of: (t) => t.node, words: (t) => t.node || UNKNOWN },
  { name: "progress", of: (t) => (t.chunks ? t.settled / t.chunks : null) },
  { name: "done", of: (t) => listed(t, t.done + t.before), words: (t) => whole(listed(t, t.done + t.before)) },
  { name: "failed", of: (t) => listed(t, t.failed), words: (t) => whole(listed(t, t.failed)) },
  { name: "left", of: (t) => listed(t, t.pending), words: (t) => whole(listed(t, t.pending)) },
  { name: "rate", of: (t) => t.rate, words: (t) => speed(t.rate) },
  { name: "ends", of: (t) => t.ends_at_ms, words: (t) => moment(t.ends_at_ms) },
  { name: "CPU", of: (t) => (t.ended_at_ms ? null : t.cpu_percent), words: (t) => (t.ended_at_ms ? UNKNOWN : shareWords(t.cpu_percent)) },
  { name: "last seen", of: (t) => t.heard_at_ms, words: (t) => moment(t.heard_at_ms) },
  { name: "working on", text: true, of: (t) => t.working_on[0], words: (t) => t.working_on.join(", ") },
];

function makeHead() {
  for (const column of COLUMNS) {
    const cell = make("th", column.text ? "text" : ""), button = make("button", "", column.name);
    cell.scope = "col";
    button.addEventListener("click", () => {
      wanted.down = orderNow() === column.name && !wanted.down;
      wanted.order = column.name;
      draw();
    });
    cell.append(button);
    $("tasks-head").append(cell);
  }
}

// Tasks that need attention come first.
const orderNow = () => wanted.order || "state";

function compare(a, b) {
  if (Array.isArray(a)) return compare(a[0], b[0]) || compare(a[1], b[1]);
  return typeof a === "string" && typeof b === "string" ? a.localeCompare(b, "en", { numeric: true }) : a < b ? -1 : a > b ? 1 : 0;
}

function arranged(tasks) {
  const column = COLUMNS.find((c) => c.name === orderNow()), sign = wanted.down ? -1 : 1;
  const ranked = tasks.map((task) => [column.of(task), task]);
  const unknown = ranked.filter(([value]) => !known(value)), others = ranked.filter(([value]) => known(value));
  others.sort(([a], [b]) => sign * compare(a, b));
  return [...others, ...unknown].map(([, task]) => task); // unknown values come last in any order
}

function makeTask(task) {
  const row = make("tr");
  for (const column of COLUMNS) {
    const cell = make(column.name === "task" ? "th" : "td", column.text ? "text" : "");
    if (column.name === "task") {
      cell.scope = "row";
      const button = make("button");
      button.addEventListener("click", () => openDetails(task.name));
      cell.append(button);
    }
    if (column.name === "state") cell.append(make("span", "state"));
    if (column.name === "progress") {
      const meter = make("span", "meter");
      meter.append(make("div", "done"), make("div", "failed"));
      cell.append(meter, make("span"));
    }
    row.append(cell);
  }
  return row;
}

function updateTask(row, task) {
  if (row.task === task) return;
  row.task = task;
  COLUMNS.forEach((column, i) => {
    const cell = row.children[i];
    if (column.name === "task") setText(cell.firstChild, task.label);
    else if (column.name === "state") {
      cell.firstChild.className = `state ${task.state}`;
      setText(cell.firstChild, task.state);
    } else if (column.name === "progress") {
      const [done, failed] = cell.firstChild.children, all = task.chunks || 1;
      done.style.width = `${(100 * (task.settled - task.failed)) / all}%`;
      failed.style.width = `${(100 * task.failed) / all}%`;
      setText(cell.lastChild, task.chunks ? progress(task.settled / task.chunks) : UNKNOWN);
    } else {
      setText(cell, column.words(task));
      if (column.text) cell.title = column.words(task);
    }
  });
}

function drawTasks() {
  const every = [...seen.tasks.values()], filter = $("tasks-filter").value.trim();
  $("tasks-section").hidden = !seen.ofRun;
  const found = every.filter((t) => (!wanted.state || t.state === wanted.state) && (!filter || fits(
    [t.label, t.name, t.node, t.state, t.engine, ...t.working_on].join(" ").toLowerCase(), filter)));
  const rows = arranged(found), shown = wanted.allRows ? rows : rows.slice(0, MOST_ROWS);
  COLUMNS.forEach((column, i) => {
    const cell = $("tasks-head").children[i];
    if (column.name === orderNow()) cell.setAttribute("aria-sort", wanted.down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
  sync($("tasks"), shown, (t) => t.name, makeTask, updateTask);
  setText($("tasks-many"), every.length === found.length ? whole(every.length) : `${whole(found.length)} of ${whole(every.length)}`);
  offerMore($("more-tasks"), rows.length - shown.length, "tasks");
  drawStates();
}

function drawStates() {
  const states = STATES.filter((state) => (seen.total.states || {})[state]);
  sync($("states"), states, (s) => s, (state) => {
    const button = make("button");
    button.addEventListener("click", () => {
      wanted.state = wanted.state === state ? null : state;
      draw();
    });
    return button;
  }, (button, state) => {
    button.setAttribute("aria-pressed", String(wanted.state === state));
    setText(button, `${state} ${whole(seen.total.states[state])}`);
  });
}

async function openDetails(name) {
  const task = seen.tasks.get(name);
  if (!task) return;
  setText($("details-heading"), `Task ${task.label}`);
  const lines = [
    ["state", task.state + (known(task.exit_code) ? `, exit code ${task.exit_code}` : "")],
    ["name", task.name], ["node", task.node || UNKNOWN], ["engine", task.engine || UNKNOWN],
    ["devices", whole(task.devices)], ["workers", whole(task.workers)],
    ["chunks", `${whole(task.settled)} of ${whole(task.chunks)}, ${whole(task.failed)} failed, ${whole(task.before)} done in earlier attempts`],
    ["audio", audioTime(task.audio_done_s)], ["speed", `${speed(task.rate)} real time`],
    ["started", moment(task.started_at_ms)], ["ended", moment(task.ended_at_ms)], ["expected end", moment(task.ends_at_ms)],
    ["last seen", moment(task.heard_at_ms)], ["working on", task.working_on.join(", ") || UNKNOWN],
  ];
  $("details-words").replaceChildren(...lines.flatMap(([word, text]) => [make("dt", "", word), make("dd", "", text)]));
  setText($("details-log"), "…");
  $("details").showModal();
  try {
    const answer = await fetch(`api/tasks/${encodeURIComponent(name)}/log`);
    const log = await answer.json();
    setText($("details-log"), answer.ok ? (log.whole ? "" : "…\n") + log.lines.join("\n") || "The log is empty." : log.error);
  } catch (error) {
    setText($("details-log"), "The log cannot be read now.");
  }
  $("details-log").scrollTop = $("details-log").scrollHeight;
}

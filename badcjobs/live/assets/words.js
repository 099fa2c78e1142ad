// The live page: its data, number formats, and helpers for elements. Texts are set as text, never as HTML.
"use strict";

const FEW_ALERTS = 3, FEW_CARDS = 12, MORE_CARDS = 48, MOST_ROWS = 50, QUIET_MS = 25000, AGAIN_MS = 2000, DRAW_MS = 250;
const UNKNOWN = "–";
const STATES = ["killed", "failed", "silent", "stopped", "unbegun", "running", "waiting", "done"];
const $ = (id) => document.getElementById(id);

const seen = { title: "", ofRun: true, atMs: 0, total: {}, verdict: null, reading: null, tasks: new Map(), devices: new Map(), findings: [], remarks: [] };
const wanted = { state: null, order: null, down: false, alerts: FEW_ALERTS, cards: FEW_CARDS, allRows: false };

// For JSON.parse: escape control characters and those that turn text around; line ends stay.
const CONTROL = /(?!\n)[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;
const plain = (_key, value) =>
  typeof value === "string" ? value.replace(CONTROL, (sign) => `\\u${sign.codePointAt(0).toString(16).padStart(4, "0")}`) : value;

// --- numbers, written as badcjobs/words.py writes them ---------------------------------------------------------------

const GIB = 2 ** 30, MIB = 2 ** 20, SMALLEST = 0.0001, MANY_W = 10000;
const known = (value) => value !== null && value !== undefined;
const twoDigits = (value) => String(value).padStart(2, "0");
const fixed = (value, digits) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const whole = (value) => (known(value) ? fixed(value, 0) : UNKNOWN);

function number(value, digits = 1) {
  if (!known(value)) return UNKNOWN;
  if (value === 0 || Math.abs(value) >= 10 ** -digits) return fixed(value, digits);
  if (Math.abs(value) < SMALLEST) return `under ${SMALLEST}`;
  return String(Number(value.toPrecision(2)));
}

const count = (many, one) => (many === 1 ? `1 ${one}` : `${fixed(many, 0)} ${one}s`);

function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 59.95) return `${fixed(seconds, 1)} s`;
  const wholeS = Math.floor(seconds + 0.5);
  if (wholeS < 3600) return `${Math.floor(wholeS / 60)} min ${twoDigits(wholeS % 60)} s`;
  const minutes = Math.floor((wholeS + 30) / 60);
  return `${fixed(Math.floor(minutes / 60), 0)} h ${twoDigits(minutes % 60)} min`;
}

function shareWords(percent) {
  if (!known(percent)) return UNKNOWN;
  return percent > 0 && percent < 0.5 ? "<1 %" : `${fixed(percent, 0)} %`;
}

function progress(share) {
  const percent = Math.min(100, Math.floor(100 * share + 1e-9));
  return share > 0 && percent === 0 ? "<1 %" : `${percent} %`;
}

function memory(bytes) {
  if (!known(bytes)) return UNKNOWN;
  return bytes >= GIB ? `${fixed(bytes / GIB, 1)} GiB` : `${fixed(bytes / MIB, 0)} MiB`;
}

function power(watts) {
  if (!known(watts)) return UNKNOWN;
  return watts >= MANY_W ? `${fixed(watts / 1000, 1)} kW` : `${fixed(watts, 0)} W`;
}

const speed = (timesRealTime) => (known(timesRealTime) ? `${number(timesRealTime)} ×` : UNKNOWN);
const temperature = (celsius) => (known(celsius) ? `${fixed(celsius, 0)} °C` : UNKNOWN);
const audioTime = (seconds) => `${number(seconds / 3600, 2)} hours`;

// --- times, on the reader's clock --------------------------------------------------------------------------------------

const clockTime = (ms) => new Date(ms).toLocaleTimeString("en", { hourCycle: "h23", hour: "2-digit", minute: "2-digit", second: "2-digit" });
const isToday = (ms) => new Date(ms).toDateString() === new Date().toDateString();
const day = (ms) => new Date(ms).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
const dayAndTime = (ms) => (isToday(ms) ? clockTime(ms) : `${day(ms)} ${clockTime(ms)}`);

function moment(ms) {
  if (!known(ms)) return UNKNOWN;
  const time = clockTime(ms).slice(0, 5);
  return isToday(ms) ? time : `${day(ms)} ${time}`;
}

// --- elements -----------------------------------------------------------------------------------------------------

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (known(text)) element.textContent = text;
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Update the children of an element to match a list; unchanged children keep their focus and hover.
function sync(parent, items, keyOf, create, update) {
  const there = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = there.get(key);
    if (child) there.delete(key);
    else {
      child = create(item);
      child.dataset.key = key;
    }
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const child of there.values()) child.remove();
}

// The live page: its data, number formats, and helpers for elements. Texts are set as text, never as HTML.
"use strict";

const FEW_ALERTS = 3, FEW_CARDS = 12, MORE_CARDS = 48, MOST_ROWS = 50, QUIET_MS = 25000, AGAIN_MS = 5000, DRAW_MS = 250;
const UNKNOWN = "–";
const STATES = ["killed", "failed", "silent", "stopped", "unbegun", "running", "waiting", "done"];
const $ = (id) => document.getElementById(id);

const seen = { title: "", ofRun: true, atMs: 0, total: {}, verdict: null, reading: null, tasks: new Map(), devices: new Map(), findings: [], remarks: [] };
const wanted = { state: null, order: null, down: false, alerts: FEW_ALERTS, cards: FEW_CARDS, allRows: false };

// For JSON.parse: escape control characters and those that turn text around; line ends stay.
const CONTROL = /(?!\n)[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;
const plain = (_key, value) =>
  typeof value === "string" ? value.replace(CONTROL, (sign) => `\\u${sign.codePointAt(0).toString(16).padStart(4, "0")}`) : value;

// --- formats -----------------------------------------------------------------------------------------------------------

const known = (value) => value !== null && value !== undefined;
const whole = (value, unit = "") => (known(value) ? Math.round(value).toLocaleString("en") + unit : UNKNOWN);
const gib = (value) => (known(value) ? (value / 2 ** 30).toFixed(1) : UNKNOWN);
const clockTime = (ms) => new Date(ms).toLocaleTimeString("en", { hourCycle: "h23", hour: "2-digit", minute: "2-digit", second: "2-digit" });

function dayAndTime(ms) {
  const at = new Date(ms), today = at.toDateString() === new Date().toDateString();
  return `${today ? "" : `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} `}${clockTime(ms)}`;
}

function rate(value) {
  if (!known(value)) return UNKNOWN;
  return (value >= 10 ? Math.round(value).toLocaleString("en") : value.toFixed(1)) + " ×";
}

function span(seconds) {
  if (!known(seconds)) return UNKNOWN;
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 48 * 3600) return `${Math.floor(s / 3600)} h ${String(Math.floor(s / 60) % 60).padStart(2, "0")} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
}

function moment(ms) {
  if (!known(ms)) return UNKNOWN;
  const at = new Date(ms), time = at.toLocaleTimeString("en", { hourCycle: "h23", hour: "2-digit", minute: "2-digit" });
  if (at.toDateString() === new Date().toDateString()) return time;
  return `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}

function hours(seconds) {
  const value = (seconds || 0) / 3600;
  if (value > 0 && value < 1) return value < 1 / 60 ? `${Math.round(seconds)} s` : `${(seconds / 60).toFixed(1)} min`;
  return (value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1)) + " h";
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

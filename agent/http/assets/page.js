// Loads the page again when the agent has a new report, and replaces its content in place.
"use strict";

const POLL_MS = 30000;
const TICK_ERROR_MS = 1000;
const live = document.getElementById("live");
let updates = "live";
let isLoading = false;
let isOutdated = false;
let lastLoad = Date.now();

function status(text) {
  if (live.textContent !== text) live.textContent = text;
}

async function load() {
  if (document.hidden) { isOutdated = true; return; }
  if (isLoading) { isOutdated = true; return; }
  isLoading = true;
  try {
    do {
      isOutdated = false;
      const begin = Date.now();
      const answer = await fetch(location.href, { cache: "no-store" });
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!next.querySelector("main")) throw new Error("no page");
      show(next);
      lastLoad = begin;
      status(updates);
    } while (isOutdated);
  } catch {
    status("no connection to the agent since " + new Date(lastLoad).toLocaleTimeString());
  } finally {
    isLoading = false;
  }
}

function show(next) {
  const open = [...document.querySelectorAll("details[open]")].map((one) => one.id);
  const active = document.activeElement;
  const focused = active && (active.id || (active.tagName === "SUMMARY" && active.parentElement.id));
  document.title = next.title;
  document.querySelector("main").replaceWith(next.querySelector("main"));
  for (const id of open) {
    const details = document.getElementById(id);
    if (details) details.open = true;
  }
  const target = focused && document.getElementById(focused);
  if (target) (target.tagName === "DETAILS" ? target.firstElementChild : target).focus({ preventScroll: true });
}

function listen() {
  const events = new EventSource("events");
  events.onmessage = (event) => {
    if (event.data !== document.body.dataset.version) {
      document.body.dataset.version = event.data;
      load();
    }
  };
  events.onopen = () => status(updates = "live");
  events.onerror = () => {
    if (events.readyState === EventSource.CLOSED) { // refused: too many streams are open
      updates = "updated every " + POLL_MS / 1000 + " s";
      setTimeout(listen, POLL_MS);
    }
    load(); // its failure shows a lost connection
  };
}

document.addEventListener("visibilitychange", () => { if (!document.hidden && isOutdated) load(); });
setInterval(() => { if (Date.now() - lastLoad >= POLL_MS - TICK_ERROR_MS) load(); }, POLL_MS);
listen();

// Keeps a page up to date: when a live event says that the dashboard has polled, the page is fetched again and its
// changes are applied. Also shows how old the figures are, and whether the connection is lost.

import { morph } from "./morph.js";
import { ago } from "./wording.js";

const QUIET_S = 25; // a heartbeat comes every 10 s
const RETRY_S = [0.1, 1, 2, 4, 8, 15];
const REFRESH_S = 2; // at least this long between two fetches
const FETCH_S = 15;

const box = document.getElementById("live");
const state = document.getElementById("live-state");
const main = document.getElementById("main");
const still = "still" in main.dataset; // a page in which the visitor types is not fetched again
const seconds = () => performance.now() / 1000;

let looked = seconds() - Number(box.dataset.age);
let shownAt = Number(box.dataset.at);
let heard = seconds();
let source;
let failures = 0;
let retryAt = Infinity;
let refreshAt = Infinity;
let refreshed = -Infinity;
let fetching = false;

function say(kind, words) {
  box.className = `live ${kind}`;
  if (state.textContent !== words) state.textContent = words;
}

function tick() {
  document.getElementById("live-age").textContent = ago(seconds() - looked);
  if (document.hidden) return;
  if (source && seconds() - heard > QUIET_S) lose();
  if (seconds() >= retryAt) connect();
  if (seconds() >= refreshAt && !fetching) refresh();
}

function connect() {
  close(); // a page restored from the browser's cache connects a second time
  retryAt = Infinity;
  heard = seconds();
  source = new EventSource("/api/v1/events");
  source.addEventListener("overview", (event) => {
    hear();
    const at = JSON.parse(event.data).at;
    if (at !== shownAt) looked = seconds(); // the first event after connecting may be old
    shownAt = at;
    if (!still) {
      // spread the fetches of all visitors over half a second
      refreshAt = Math.min(refreshAt, Math.max(seconds(), refreshed + REFRESH_S) + Math.random() / 2);
    }
  });
  source.addEventListener("heartbeat", hear);
  source.addEventListener("error", lose);
}

function hear() {
  heard = seconds();
  failures = 0;
  say("on", "Live");
}

function lose() {
  close();
  retryAt = seconds() + RETRY_S[Math.min(failures, RETRY_S.length - 1)] * (0.75 + Math.random() / 2);
  // a stream that ended normally is reopened before the visitor needs to know; one that fell silent has already cost time
  if (failures++ || seconds() - heard > QUIET_S) say("lost", "Connection lost, trying again");
  if (failures > 2 && !still) refreshAt = seconds();
}

function close() {
  source?.close();
  source = undefined;
}

async function refresh() {
  fetching = true;
  refreshAt = Infinity;
  refreshed = seconds();
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" }, signal: AbortSignal.timeout(FETCH_S * 1000) });
    if (answer.status !== 200 && answer.status !== 404) throw new Error(`status ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    looked = seconds() - Number(page.getElementById("live").dataset.age);
    morph(main, page.getElementById("main"));
    document.title = page.title;
    offerCopies();
  } catch {
    refreshAt = seconds() + REFRESH_S * 2;
  } finally {
    fetching = false;
  }
}

// a hidden page holds no connection, even if it was opened in a background tab
function follow() {
  if (document.hidden) {
    close();
    retryAt = Infinity;
    say("", "Paused");
  } else {
    connect();
  }
}

document.addEventListener("visibilitychange", follow);
window.addEventListener("pagehide", close);
window.addEventListener("pageshow", (event) => event.persisted && follow());

function offerCopies() {
  for (const button of document.querySelectorAll("button.copy[hidden]")) button.hidden = false;
}

async function copy(button) {
  const code = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code); // there is no clipboard without https: select the text for the visitor to copy
    button.textContent = "Selected: press Ctrl-C";
  }
  setTimeout(() => (button.textContent = "Copy"), 3000);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("button.copy");
  if (button) copy(button);
});

offerCopies();
follow();
setInterval(tick, 500);

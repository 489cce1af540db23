// Keeps a page as the swarm is: whenever the live events say that somebody looked, the page is fetched once more and
// what changed is put in. Says how old the picture is, and when the connection is lost.

import { morph } from "./morph.js";
import { ago } from "./wording.js";

const QUIET_S = 25; // a heartbeat comes every 10 s
const RETRY_S = [0.1, 1, 2, 4, 8, 15];
const REFRESH_S = 2; // at most one fetch in so long
const FETCH_S = 15;

const box = document.getElementById("live");
const state = document.getElementById("live-state");
const main = document.getElementById("main");
const still = "still" in main.dataset; // a page that the visitor works in is not fetched again
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
  close(); // a page that comes back from the browser's cache is shown twice
  retryAt = Infinity;
  heard = seconds();
  source = new EventSource("/api/v1/events");
  source.addEventListener("overview", (event) => {
    hear();
    const at = JSON.parse(event.data).at;
    if (at !== shownAt) looked = seconds(); // what comes first after connecting may be old
    shownAt = at;
    if (!still) {
      // visitors do not all come in the same moment
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
  // a stream that ended in good order is back before anyone needs to be told
  if (failures++) say("lost", "Connection lost, trying again");
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

// a page that nobody looks at holds no connection, also one that is opened in a tab behind this one
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
    getSelection().selectAllChildren(code); // without https there is no clipboard: one key is left to press
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

// A chat box that uses the gateway's API: streams an answer, then shows its trace.

import { showTrace } from "./waterfall.js";
import { duration } from "./wording.js";

const field = (id) => document.getElementById(id);
const form = field("ask");
const unanswered = [...(field("trace")?.childNodes ?? [])];
let running;

if (form) {
  const key = navigator.platform.startsWith("Mac") ? "⌘" : "Ctrl";
  // phones have no such key
  if (matchMedia("(hover: hover)").matches) field("shortcut").textContent = `${key}-Enter sends`;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  field("stop").addEventListener("click", () => running?.abort());
  field("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
}

async function ask() {
  if (running) return;
  const began = performance.now();
  running = new AbortController();
  toggle(true);
  tell("Waiting for the first word…");
  field("answer").textContent = "";
  field("answer").className = "";
  field("trace").replaceChildren(...unanswered);
  let trace = "";
  let numPieces = 0;
  try {
    const response = await send(running.signal);
    trace = response.headers.get("x-swarm-trace") ?? "";
    for await (const piece of pieces(response.body)) {
      if (!numPieces++) tell(`First word after ${duration((performance.now() - began) / 1000)}.`);
      field("answer").append(piece);
    }
    tell(`Done in ${duration((performance.now() - began) / 1000)}.`);
  } catch (error) {
    if (error.name === "AbortError") tell("Stopped.");
    else tell(reason(error), true);
  } finally {
    running = undefined;
    toggle(false);
  }
  if (trace) await follow(trace, field("model").value);
}

function headers() {
  const key = field("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function send(signal) {
  const chats = field("mode").value === "chat";
  const words = field("question").value;
  const asked = { model: field("model").value, max_tokens: Number(field("length").value), stream: true };
  const body = chats ? { ...asked, messages: [{ role: "user", content: words }] } : { ...asked, prompt: words };
  const path = chats ? "/v1/chat/completions" : "/v1/completions";
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (response.ok) return response;
  if (response.status === 401) field("key-row").hidden = false;
  throw new Error(await failure(response));
}

// each browser has other words for a lost connection, which it reports as a TypeError
function reason(error) {
  return error instanceof TypeError ? "the connection to the gateway failed; try again" : error.message;
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The gateway answered with status ${response.status}.`;
  }
}

// yields the texts of an event stream, in OpenAI's form of either endpoint
async function* pieces(stream) {
  let rest = "";
  for await (const chunk of decoded(stream)) {
    const events = (rest + chunk).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const said = JSON.parse(data);
      if (said.error) throw new Error(said.error.message);
      const choice = said.choices[0];
      const text = choice?.delta?.content ?? choice?.text;
      if (text) yield text;
    }
  }
}

async function* decoded(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

async function follow(id, model) {
  const place = field("trace");
  try {
    const response = await fetch(`/v1/traces/${encodeURIComponent(id)}`, { headers: headers() });
    if (!response.ok) throw new Error(await failure(response));
    showTrace(place, await response.json(), await names(model));
  } catch (error) {
    place.textContent = `The trace could not be read: ${reason(error)}`;
  }
}

// names of the model's servers, by peer id; without a name the waterfall shows the end of the id
async function names(model) {
  try {
    const response = await fetch(`/api/v1/models/${encodeURIComponent(model)}`);
    return new Map((await response.json()).servers.map((server) => [server.peer_id, server.name]));
  } catch {
    return new Map();
  }
}

function tell(words, failed = false) {
  field("progress").textContent = words;
  field("progress").classList.toggle("failed", failed);
}

function toggle(busy) {
  field("send").disabled = busy;
  field("stop").hidden = !busy;
}

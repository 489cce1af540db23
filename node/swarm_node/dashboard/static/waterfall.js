// Draws the trace of a request: where the whole time went, then the times of an average token at each hop of the last
// chain. Below this it lists the servers that were replaced during the answer, and how long that took.

import { duration } from "./wording.js";

const SVG = "http://www.w3.org/2000/svg";

// `names` are the nodes' names by peer id; a node without a name is shown by the end of its id
export function showTrace(place, trace, names = new Map()) {
  const hops = (trace.hops ?? []).filter((hop) => !hop.is_replaced).sort((one, other) => one.start - other.start);
  if (!hops.length) {
    place.replaceChildren(make("p", { class: "quiet" }, "The trace of this answer names no hop."));
    return;
  }
  const short = (peer) => names.get(peer) || `…${peer.slice(-8)}`;
  place.replaceChildren(summary(trace, hops.length), table(hops, short), legend(), ...replays(trace.replays ?? [], short));
}

const ms = (value) => duration((value ?? 0) / 1000);
const counted = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

function summary(trace, numHops) {
  const answered = Math.max((trace.total_ms ?? 0) - (trace.first_token_ms ?? 0), 0);
  const rate = trace.num_tokens > 1 && answered ? `, ${((1000 * (trace.num_tokens - 1)) / answered).toFixed(1)} tokens per second after the first` : "";
  return make(
    "p",
    { class: "lead strong" },
    `${counted(trace.num_tokens, "token")} over ${counted(numHops, "hop")}: ${ms(trace.opening_ms)} to find servers, first token after ` +
      `${ms(trace.first_token_ms)}, ${ms(trace.total_ms)} in total${rate}.`,
  );
}

// hops in the order in which a token passes them: each bar begins where the one before ends
function table(hops, short) {
  const total = hops.reduce((sum, hop) => sum + hop.ms_per_step, 0) || 1;
  const head = make("tr", {}, ...["Hop", "Timeline of a token", "Blocks", "Queue", "Compute", "Network", "Sum"].map((text, i) => heading(text, i)));
  let begun = 0;
  const rows = hops.map((hop) => {
    const row = hopRow(hop, begun, total, short);
    begun += hop.ms_per_step;
    return row;
  });
  return make("table", { class: "fall" }, make("caption", { class: "unseen" }, "Times of an average token at each hop"), make("thead", {}, head), make("tbody", {}, ...rows));
}

function heading(text, i) {
  return make("th", { scope: "col", class: i === 1 ? "blocks" : i > 2 ? "num" : "" }, text);
}

// as in the pages' links, the end of a peer id is not broken over two lines
function nodeName(name) {
  const at = name.lastIndexOf(" …");
  return at < 0 ? make("bdi", {}, name) : make("bdi", {}, name.slice(0, at + 1), make("span", { class: "nowrap" }, name.slice(at + 1)));
}

function hopRow(hop, begun, total, short) {
  const steps = Math.max(hop.num_steps, 1);
  const parts = [hop.queue_ms / steps, hop.compute_ms / steps, hop.wire_ms / steps];
  const link = make("a", { href: `/nodes/${encodeURIComponent(hop.peer_id)}` }, nodeName(short(hop.peer_id)));
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, link),
    make("td", { class: "blocks" }, bar(parts, begun, total)),
    make("td", { class: "nowrap" }, `${hop.start}:${hop.end}`),
    ...[...parts, hop.ms_per_step].map((value) => make("td", { class: "num nowrap" }, ms(value))),
  );
}

function bar(parts, begun, total) {
  const scale = 100 / total;
  let x = begun * scale;
  const drawn = parts.map((value, i) => {
    const rect = draw("rect", { class: `fill hop${[1, 0, 2][i]}`, x, width: value * scale, height: 10 });
    x += value * scale;
    return rect;
  });
  const ground = draw("rect", { class: "ground", width: 100, height: 10 });
  return draw("svg", { class: "strip", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, ground, ...drawn);
}

function legend() {
  const entries = [["hop1", "waits in the queue"], ["hop0", "is computed"], ["hop2", "is on the network"]];
  return make("ul", { class: "legend" }, ...entries.map(([kind, text]) => make("li", {}, make("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text)));
}

function replays(all, short) {
  if (!all.length) return [];
  const lines = all.map((one) => {
    const how = one.was_handed_over ? "received its cache" : `computed ${one.num_tokens} tokens again`;
    return make("li", {}, `Blocks ${one.start}:${one.end}: ${short(one.lost_peer)} was lost (${one.reason}), ${one.new_peers.map(short).join(", ")} took over and ${how}, a pause of ${ms(one.failover_ms)}.`);
  });
  return [make("h3", {}, "Servers replaced during the answer"), make("ul", { class: "tasks" }, ...lines)];
}

function make(name, attributes, ...children) {
  return put(document.createElement(name), attributes, children);
}

function draw(name, attributes, ...children) {
  return put(document.createElementNS(SVG, name), attributes, children);
}

function put(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== "") element.setAttribute(name, value);
  element.append(...children);
  return element;
}

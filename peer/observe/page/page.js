"use strict";
// Shows what /status.json and /now.json say. Peers have written part of it: it becomes text, never markup.

const POLL_MS = 2000, HISTORY_MS = 10000, SILENT_MS = 6000;
const $ = id => document.getElementById(id);
const number = (x, digits = 0) => x == null ? "-" : x.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
const percent = x => x == null ? "-" : number(100 * x) + " %";
const short = id => id ? id.slice(-8) : "-";
const milliseconds = s => s == null ? "-" : s < 1 ? number(1e3 * s, 1) + " ms" : number(s, 1) + " s";
const LENGTHS = [["days", 86400, 1], ["h", 3600, 1], ["min", 60, 0], ["s", 1, 0]];
function duration(s) {
  const [unit, length, digits] = LENGTHS.find(([, length]) => s >= 2 * length) ?? LENGTHS.at(-1);
  return number(s / length, digits) + " " + unit;
}
const DAY_MS = 86400e3;
function clock(ms, span_ms) {  // with the day where more than one is meant
  const day = span_ms > 0.8 * DAY_MS ? {weekday: "short"} : {};
  return new Date(ms).toLocaleString("en-GB", {...day, hour: "2-digit", minute: "2-digit"});
}

// --- parts of the page ---------------------------------------------------------------------------

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text ?? "";
  return made;
}
function row(...cells) {
  const made = document.createElement("tr");
  made.append(...cells.map(cell => element("td", cell)));
  return made;
}
function shade(cell, share) {  // of a map of heat: 0 nothing, 1 the most
  cell.style.backgroundColor = `rgb(224 122 60 / ${0.75 * share})`;
}
const fill = (id, rows) => $(id).replaceChildren(...rows);

// --- curves --------------------------------------------------------------------------------------

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name);
function curve(id, named, digits, range) {
  const axis = {stroke: color("--soft"), grid: {stroke: color("--line"), width: 1}, ticks: {stroke: color("--line")}};
  const series = named.map(([label, stroke, dash]) =>
    ({label, stroke, width: 1.5, dash, spanGaps: true, points: {show: false}, value: (_, v) => number(v, digits)}));
  const size = () => ({width: $(id).clientWidth || 480, height: 190});
  const times = (u, marks) => marks.map(t => clock(1e3 * t, 1e3 * (u.scales.x.max - u.scales.x.min)));
  const axes = [{...axis, size: 30, space: 80, values: times}, {...axis, size: 60, values: (_, marks) => marks.map(v => v.toLocaleString("en"))}];
  const made = new uPlot({...size(), series: [{label: "at", value: (_, t) => t == null ? "-" : clock(1e3 * t, DAY_MS)}, ...series], axes, scales: {y: {range}}}, [[], ...named.map(() => [])], $(id));
  addEventListener("resize", () => made.setSize(size()));
  return made;
}
const BLUE = "#3b7dd8", RED = "#d1495b", GREEN = "#2a9d6f", GREY = "#8a939c";
const losses = curve("losses", [["training", GREY], ["held out", RED], ["all peers, mean", BLUE], ["best", BLUE, [4, 4]], ["worst", BLUE, [1, 4]]], 4);
const speed = curve("speed", [["this peer", RED], ["swarm", BLUE]], 0);
const line = curve("line", [["sent", RED], ["received", BLUE]], 3);
const share = curve("share", [["averaged", GREEN]], 0, [0, 100]);

function draw(status) {
  const h = status.history, scaled = (name, by) => h[name].map(v => v == null ? null : by * v);
  const at = h.up_s.map(t => Date.now() / 1e3 - (status.up_s - t));
  const show = (curve, data) => { curve.setData(data); curve.setLegend({idx: at.length - 1}, false); };
  show(losses, [at, h.train_loss, h.validation_loss, h.peers_loss, h.best_loss, h.worst_loss]);
  show(speed, [at, h.tokens_per_s, h.swarm_tokens_per_s]);
  show(line, [at, scaled("sent_bytes_per_s", 1e-6), scaled("received_bytes_per_s", 1e-6)]);
  show(share, [at, scaled("averaged_share", 100)]);
}

// --- what is told --------------------------------------------------------------------------------

function tellRun(s) {
  document.title = `${percent(s.total_steps ? s.step / s.total_steps : null)} loco-peer ${short(s.peer_id)}`;
  $("peer").textContent = `${short(s.peer_id)} in run ${(s.run_id ?? "-").slice(0, 8)}`;
  $("state").textContent = s.doing && s.doing !== s.state ? `${s.state}: ${s.doing} (${duration(s.since_s)})` : s.state;
  const share = s.total_steps ? Math.min(1, s.step / s.total_steps) : 0;
  $("bar").value = share;
  const left = s.left_s == null ? "" : `, ${duration(s.left_s)} left, until ${clock(Date.now() + 1e3 * s.left_s, 1e3 * s.left_s)}`;
  $("far").textContent = s.total_steps ? `Step ${number(s.step)} of ${number(s.total_steps)} (${percent(share)})${left}` : "";
  const problems = s.problems ?? [];
  fill("problems", problems.map(p => element("li", `${p.words} (docs/${p.help})`)));
  $("problems").hidden = !problems.length;
}
function cost(s) {
  const at = seconds => number(s.price_per_hour * seconds / 3600, 2);
  return s.left_s == null ? at(s.up_s) : `${at(s.up_s)} of ${at(s.up_s + s.left_s)}`;
}
function tellFacts(s) {
  const facts = {
    "tokens/s": number(s.tokens_per_s), "tokens/s, swarm": number(s.swarm_tokens_per_s),
    "training loss": number(s.train_loss, 4), "held-out loss": number(s.validation_loss, 4),
    "other peers": number(s.peers.length), "last 50 rounds averaged": percent(s.outcomes.recent_share),
    "tokens": number(s.tokens), "up for": duration(s.up_s),
  };
  if (s.price_per_hour != null) facts["cost of this machine"] = cost(s);
  fill("facts", Object.entries(facts).map(([name, value]) => {
    const made = element("div");
    made.append(element("dt", name), element("dd", value));
    return made;
  }));
}
function tellPeers(s) {
  const most = Math.max(1, ...s.peers.map(p => p.averages)), slowest = Math.max(1e-9, ...s.peers.map(p => p.average_s ?? 0));
  const rows = s.peers.map(p => {
    const made = row(short(p.peer_id), p.state, number(p.step), number(p.validation_loss, 4), milliseconds(p.rtt_s), number(p.averages), milliseconds(p.average_s));
    made.title = p.peer_id;
    shade(made.cells[5], p.averages / most);
    shade(made.cells[6], (p.average_s ?? 0) / slowest);
    return made;
  });
  fill("peers", rows.length ? rows : [row("nobody else is here")]);
}
// Rows are tellers, columns their partners: darker took longer, and the number counts the averages.
const CELL = 22, NAMES = 78, SVG = $("map").namespaceURI;
function shape(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.textContent = text ?? "";
  parent.append(made);
  return made;
}
function tellPairs(s) {
  const {peers, averages, average_s} = s.pairs, size = NAMES + CELL * peers.length;
  $("pairs").hidden = !averages.flat().some(n => n);
  const slowest = Math.max(1e-9, ...average_s.flat().map(x => x ?? 0)), map = $("map");
  map.replaceChildren();
  for (const [name, value] of [["width", size], ["height", size], ["viewBox", `0 0 ${size} ${size}`]]) map.setAttribute(name, value);
  peers.forEach((teller, i) => {
    const middle = NAMES + CELL * (i + .5);
    shape(map, "text", {x: NAMES - 6, y: middle + 4, "text-anchor": "end"}, short(teller));
    shape(map, "text", {x: 6 - NAMES, y: middle + 4, transform: "rotate(-90)"}, short(teller));
    peers.forEach((partner, j) => {
      const at = {x: NAMES + CELL * j, y: NAMES + CELL * i}, box = {width: CELL - 1, height: CELL - 1};
      const cell = shape(map, "g", {});
      shape(cell, "rect", {...at, ...box, class: i === j ? "same" : "pair"});
      if (!averages[i][j]) return;
      shape(cell, "rect", {...at, ...box, fill: "rgb(224 122 60)", "fill-opacity": .15 + .85 * average_s[i][j] / slowest});
      shape(cell, "text", {x: at.x + CELL / 2, y: at.y + CELL / 2 + 4, "text-anchor": "middle"}, averages[i][j] > 999 ? "…" : averages[i][j]);
      shape(cell, "title", {}, `${short(teller)} says: ${number(averages[i][j])} with ${short(partner)}, ${milliseconds(average_s[i][j])} each`);
    });
  });
}
function tellExperts(s) {
  $("experts").hidden = !s.matrix;
  if (!s.matrix) return;
  const {names, losses, together, gains, advice} = s.matrix, rows = [...losses, together];
  const best = names.map((_, at) => Math.min(...rows.map(row => row[at] ?? Infinity)));
  const cells = row => row.map((loss, at) => number(loss, 4) + (loss === best[at] ? "*" : ""));
  const gained = gain => gain == null ? "-" : (1e15 * gain).toPrecision(3);
  fill("domains", ["", ...names, "gain"].map(name => element("th", name)));
  fill("matrix", rows.map((losses, at) => row(names[at] ?? "ensemble", ...cells(losses), gained(gains[at]))));
  $("advice").textContent = advice ? `Steps would pay more with ${advice[1]} than with ${advice[0]} (docs/experts.md)` : "";
}
const INTO = {train: "training", encode: "encoding weights", merge: "taking over averages", measure: "measuring losses", keep: "keeping checkpoints",
  stalled: "standing still for averages", data: "standing still for data"};
const BESIDE = {pack: "packing vectors", match: "finding a partner", exchange: "exchanging vectors", apply: "the outer step"};
function bars(spent, whole, names = {}) {
  return Object.entries(spent).filter(([, s]) => s > 0).map(([what, s]) => {
    const part = Math.min(1, s / whole), made = row(names[what] ?? what, `${duration(s)} (${percent(part)})`);
    shade(made.cells[1], part);
    return made;
  });
}
function tellRounds(s) {
  for (const [id, names] of [["seconds", INTO], ["beside", BESIDE]]) {
    fill(id, bars(Object.fromEntries(Object.keys(names).map(what => [what, s.seconds[what] ?? 0])), s.up_s, names));
  }
  const skipped = Object.entries(s.outcomes.skipped).map(([why, n]) => row(`skipped: ${why}`, number(n)));
  fill("rounds", [row("averaged", number(s.outcomes.averaged)), ...skipped]);
}
function tellStage(s) {
  $("stage").hidden = !s.pipeline;
  if (!s.pipeline) return;
  const p = s.pipeline, all = Object.values(p.spent_s).reduce((sum, x) => sum + x, 0) || 1;
  const counted = Object.entries(s.microbatches).filter(([, n]) => n).map(([what, n]) => row(`microbatches ${what}`, number(n)));
  const links = p.links.filter(l => l.out_us).map(l => row(`line to ${short(l.peer_id)}`, milliseconds(1e-6 * (l.rtt_us + l.out_us))));
  fill("pipeline", [row("holds", s.part), row("iteration", milliseconds(p.iteration_s)), row("planned", milliseconds(p.planned_s)),
    ...counted, ...bars(p.spent_s, all), ...links]);
}
function tellLog(lines) {
  const log = $("log"), follows = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  log.textContent = lines.join("\n");
  if (follows) log.scrollTop = log.scrollHeight;
}

// --- asking --------------------------------------------------------------------------------------

let heard = Date.now(), drawn = 0, failure = "";
function complain() {
  const silent = Date.now() - heard;
  $("stale").hidden = silent < SILENT_MS;
  $("stale").textContent = `The daemon has not answered for ${duration(silent / 1e3)}: it has ended, or cannot be reached. ${failure}`;
}
async function ask() {
  const whole = Date.now() - drawn >= HISTORY_MS;
  const answer = await fetch(whole ? "status.json" : "now.json", {signal: AbortSignal.timeout(4000)});
  if (!answer.ok) throw new Error(await answer.text());
  const status = await answer.json();
  [tellRun, tellFacts, tellPeers, tellPairs, tellExperts, tellRounds, tellStage].forEach(tell => tell(status));
  tellLog(status.log);
  if (whole) draw(status);
  if (whole) drawn = Date.now();
  heard = Date.now();
}
async function poll() {
  try { await ask(); failure = ""; } catch (error) { failure = error.message; }
  complain();
  setTimeout(poll, POLL_MS);
}
poll();

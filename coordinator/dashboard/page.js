// Asks /status every two seconds and shows it. Texts go in as text, never as HTML: names of peers
// are strangers' words.

import { chart, PALETTE, short } from "/dashboard/charts.js";

const POLL_MS = 2000;
const TIMEOUT_MS = 10000;
const PEERS_SHOWN = 200;
const KEY = "echo2p2p admin token";
const by = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let last = null;
let heardMs = 0;

function state(name) { document.documentElement.dataset.state = name; }

function text(id, words) { by(id).textContent = words; }

function element(name, words = "", className = "") {
  const made = document.createElement(name);
  made.textContent = words;
  if (className) made.className = className;
  return made;
}

export function duration(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  const two = (n) => String(n).padStart(2, "0");
  const tail = `${two(s % 60)}`;
  return s < 3600 ? `${Math.floor(s / 60)}:${tail}`
    : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${tail}`;
}

export function bytes(count) {
  let value = count;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 999.5) return `${unit === "B" || value >= 99.95 ? value.toFixed(0)
      : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

const fixed = (value, digits) => (value === null ? "–" : value.toFixed(digits));

// --- asking ----------------------------------------------------------------------------------

async function ask() {
  const token = sessionStorage.getItem(KEY);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch("/status", { headers, cache: "no-store", credentials: "omit",
    redirect: "error", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (answer.status === 401) return login(token);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  last = await answer.json();
  heardMs = Date.now();
  show(last);
  by("lost").hidden = true;
  by("page").classList.remove("stale");
  state("shown");
  return true;
}

function login(refused) {
  sessionStorage.removeItem(KEY);
  by("page").hidden = true;
  by("login").hidden = false;
  if (refused) text("login-error", "This is not the run's admin token.");
  by("token").focus();
  state("login");
  return false;
}

by("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = by("token").value.trim();
  by("token").value = "";
  if (!/^[\x21-\x7e]+$/.test(token)) {
    text("login-error", "An admin token begins with e2a- and has no spaces.");
    return;
  }
  sessionStorage.setItem(KEY, token);
  text("login-error", "");
  poll();
});

let timer = null;
async function poll() {
  clearTimeout(timer);
  let again = true;
  if (!document.hidden || last === null) {
    try {
      again = await ask();
    } catch (error) {
      lost();
    }
  }
  if (again) timer = setTimeout(poll, POLL_MS);
}

function lost() {
  state("lost");
  if (last === null) {
    by("page").hidden = true;
    document.title = "echo2p2p: no answer";
    return;
  }
  by("page").classList.add("stale");
  by("lost").hidden = false;
  const since = duration((Date.now() - heardMs) / 1000);
  const ended = last.outcome === "running" ? "" : ` The run has ${last.outcome}.`;
  text("lost", `The coordinator has not answered for ${since}; these are its last words.${ended}`);
}

// --- showing ---------------------------------------------------------------------------------

function show(status) {
  by("login").hidden = true;
  by("page").hidden = false;
  head(status);
  tiles(status);
  const colors = peerColors(status.peers);
  rewardChart(status);
  versionCharts(status, colors);
  ageAndTime(status);
  peers(status, colors);
  ledger(status.trajectories);
}

function head(status) {
  text("run", status.run);
  const training = status.phase.name === "training";
  const words = status.outcome !== "running" ? status.outcome
    : training ? "training" : status.phase.name.replace("_", " ");
  text("phase", words);
  by("phase").className = `badge ${status.outcome !== "running" ? status.outcome
    : training ? "" : "starting"}`;
  text("elapsed", duration(status.wall_s));
  text("steps", `step ${status.step} of ${status.steps_target}`);
  const share = Math.min(1, status.step / status.steps_target);
  by("progress-bar").style.width = `${(100 * share).toFixed(2)}%`;
  by("progress").setAttribute("aria-valuenow", (100 * share).toFixed(0));
  document.title = `${fixed(status.reward_recent, 3)} · step ${status.step} · echo2p2p`;
}

function tiles(status) {
  const live = status.peers.filter((peer) => peer.state !== "gone").length;
  const good = status.trajectories.balances && status.trajectories.recount_agrees;
  const shown = [
    ["reward now", fixed(status.reward_recent, 3), `${fixed(status.reward_version0, 3)} before`],
    ["steps/s", short(status.steps_per_s),
      `learner idle ${(100 * status.learner_idle_share).toFixed(0)} %`],
    ["peers", String(live), `${short(Math.round(status.tokens_per_s))} tokens/s`],
    ["versions", String(status.versions_published), status.weights.ratio_mean
      ? `delta ${bytes(status.weights.delta_bytes_mean)}, 1/${status.weights.ratio_mean.toFixed(1)}`
      : `anchor ${bytes(status.weights.anchor_bytes)}`],
    ["age", status.age_recent === null ? "–" : `${status.age_recent.toFixed(1)} steps`,
      `at most ${status.age_steps.max} of ${status.staleness_budget}`],
    ["queue", `${status.queue.groups}`, `groups of ${status.batch_groups}`],
    ["weights sent", bytes(status.weights.peer_bytes + status.weights.source_bytes),
      `${bytes(status.weights.source_bytes)} by source`],
    ["ledger", good ? "balances" : "BROKEN", `${short(status.trajectories.issued)} issued`],
  ];
  by("tiles").replaceChildren(...shown.map(([name, figure, more]) => {
    const tile = element("div", "", name === "ledger" && !good ? "tile bad" : "tile");
    tile.append(element("span", name), element("b", figure), element("span", more));
    return tile;
  }));
}

function peerColors(all) {
  const ids = all.map((peer) => peer.peer).sort();
  return new Map(ids.map((id, at) => [id, PALETTE[at % PALETTE.length]]));
}

function rewardChart(status) {
  const { step, reward } = status.curve;
  const mean = reward.map((_, at) => {
    const part = reward.slice(Math.max(0, at - 9), at + 1);
    return part.reduce((sum, value) => sum + value, 0) / part.length;
  });
  chart(by("chart-reward"), [
    { name: "step", color: color("--accent-soft"), x: step, y: reward, width: 1.2 },
    { name: "mean of ten", color: color("--accent"), x: step, y: mean, width: 2.2 },
  ], { yMin: 0, xWhole: true, empty: "no step yet" });
}

function versionCharts(status, colors) {
  const rows = status.versions, now = status.now_s;
  const ago = (at) => (at >= -0.5 ? "now" : `−${duration(-at)}`);
  const published = { name: "published", color: color("--ink"), kind: "step", width: 1.2,
    x: rows.map((row) => row.published_s - now), y: rows.map((row) => row.version) };
  if (rows.length > 0) {
    published.x.push(0);
    published.y.push(rows[rows.length - 1].version);
  }
  const names = new Map(status.peers.map((peer) => [peer.peer, peer.name]));
  const arrived = new Map();
  for (const row of rows) {
    for (const [peer, after] of Object.entries(row.after_s)) {
      if (!arrived.has(peer)) arrived.set(peer, { x: [], y: [], delay: [] });
      const one = arrived.get(peer);
      one.x.push(row.published_s + after - now);
      one.y.push(row.version);
      one.delay.push(after);
    }
  }
  const few = arrived.size <= 6;
  const dots = [...arrived].map(([peer, one]) => ({ name: few ? names.get(peer) || "" : "",
    color: colors.get(peer) || color("--soft"), kind: "dots", x: one.x, y: one.y,
    delay: one.delay }));
  chart(by("chart-versions"), [published, ...dots], { xText: ago, yWhole: true,
    empty: "no version published yet" });
  chart(by("chart-delay"), dots.map((one) => ({ ...one, y: one.delay })), { xText: ago, yMin: 0,
    empty: "no version has reached a peer yet" });
}

function ageAndTime(status) {
  const curve = status.curve;
  chart(by("chart-age"), [
    { name: "largest", color: color("--flight"), kind: "step", x: curve.step, y: curve.age_max },
    { name: "mean", color: color("--accent"), x: curve.step, y: curve.age_mean },
  ], { yMin: 0, xWhole: true, empty: "no step yet" });
  // The wait for the very first batch is start-up, and would dwarf all that follows.
  const from = curve.step[0] === 1 && curve.step.length > 1 ? 1 : 0;
  const x = curve.step.slice(from), train = curve.train_s.slice(from);
  const both = train.map((value, at) => value + curve.idle_s[at + from]);
  chart(by("chart-time"), [
    { name: "training", color: color("--accent"), kind: "area", x, y: train },
    { name: "idle", color: color("--idle"), kind: "area", x, y: both, base: train },
  ], { yMin: 0, xWhole: true, empty: "no step yet" });
}

function peers(status, colors) {
  const live = status.peers.filter((peer) => peer.state !== "gone").length;
  const more = status.peers.length > PEERS_SHOWN ? `, ${PEERS_SHOWN} shown` : "";
  text("peer-count", `${live} of ${status.peers.length} here now${more}`);
  const ordered = [...status.peers].sort((a, b) => (a.state === "gone") - (b.state === "gone")
    || b.accepted - a.accepted || a.name.localeCompare(b.name));
  const rows = ordered.slice(0, PEERS_SHOWN).map((peer) => {
    const row = element("tr", "", peer.state === "gone" ? "gone" : "");
    const name = element("td", peer.name);
    const mark = element("i");
    mark.style.background = colors.get(peer.peer);
    name.prepend(mark);
    name.title = peer.peer;
    const behind = peer.behind ? ` (−${peer.behind})` : "";
    const reasons = Object.entries(peer.rejected_by_reason).sort((a, b) => b[1] - a[1])
      .map(([reason, count]) => `${reason} ${count}`).join(", ");
    row.append(name, element("td", peer.state, peer.state),
      element("td", peer.version === null ? "–" : `${peer.version}${behind}`),
      element("td", peer.tokens_per_s === undefined ? "–" : short(Math.round(peer.tokens_per_s))),
      element("td", String(peer.accepted)), element("td", String(peer.rejected)),
      element("td", bytes(peer.relayed_bytes)),
      element("td", peer.received_bytes === undefined ? "–" : bytes(peer.received_bytes)),
      element("td", reasons));
    return row;
  });
  by("peers").tBodies[0].replaceChildren(...rows);
}

function ledger(counts) {
  const rejected = Object.values(counts.rejected).reduce((sum, n) => sum + n, 0);
  const good = counts.balances && counts.recount_agrees;
  text("ledger-verdict", good ? "every trajectory is accounted for"
    : "the counts do not add up: please report this");
  by("ledger-verdict").className = good ? "good" : "bad";
  const parts = [
    ["trained", counts.trained, "--good"], ["queued", counts.queued, "--queued"],
    ["in flight", counts.in_flight, "--flight"], ["rejected", rejected, "--bad"],
  ];
  by("ledger-bar").replaceChildren(...parts.map(([name, count, variable]) => {
    const part = element("div");
    part.style.width = `${counts.issued ? 100 * count / counts.issued : 0}%`;
    part.style.background = `var(${variable})`;
    part.title = `${name} ${count}`;
    return part;
  }));
  const entry = (name, count, variable) => {
    const pair = element("div"), term = element("dt", name);
    if (variable) {
      const mark = element("i");
      mark.style.background = `var(${variable})`;
      term.prepend(mark);
    }
    pair.append(term, element("dd", count.toLocaleString("en")));
    return pair;
  };
  const reasons = Object.entries(counts.rejected).sort((a, b) => b[1] - a[1])
    .map(([reason, count]) => entry(`rejected: ${reason}`, count, null));
  by("ledger").replaceChildren(entry("issued", counts.issued, null),
    ...parts.slice(0, 3).map((part) => entry(...part)), entry("rejected", rejected, "--bad"),
    ...reasons);
}

let resizing = null;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => last && show(last), 150);
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
state("asking");
poll();

"use strict";
// The page: looks once a second, shows what the API says. Everything from the API reaches the document as text.

const $ = (id) => document.getElementById(id);
const LOOK_MS = 1000;
const INTERVALS = 400;
const HISTORY = 40;
const state = { ...addressed(), version: null, applied: null, busy: false, jobs: [] };

/** The address names the job and, to share one, a decision: #JOB or #JOB/VERSION, with a name's own slashes encoded. */
function addressed() {
  const [job, version] = location.hash.slice(1).split("/");
  const open = new Set(/^[1-9][0-9]{0,15}$/.test(version) ? [Number(version)] : []);
  try {
    return { job: decodeURIComponent(job), open };
  } catch {
    // Not an address that this page wrote; it names no job.
    return { job: "", open: new Set() };
  }
}

/** An element with text and elements as children; never HTML. */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

// ---- units ----
const digits = (v, n = 3) => (v === 0 ? "0" : Number(v.toPrecision(n)).toString());
function seconds(s) {
  if (s === null || s === undefined) return "–";
  const a = Math.abs(s);
  if (a === 0) return "0";
  if (a < 1e-3) return `${digits(s * 1e6)} µs`;
  if (a < 1) return `${digits(s * 1e3)} ms`;
  return `${digits(s)} s`;
}
const micros = (us) => (us === null || us === undefined ? "–" : seconds(us / 1e6));
function rate(bps) {
  if (bps === null || bps === undefined) return "–";
  for (const [unit, size] of [["Gbit/s", 1e9], ["Mbit/s", 1e6], ["kbit/s", 1e3]]) if (bps >= size) return `${digits(bps / size)} ${unit}`;
  return `${digits(bps)} bit/s`;
}
function ago(ms) {
  if (ms < 1000) return `${Math.round(ms / 10) * 10} ms`;
  if (ms < 120e3) return `${Math.round(ms / 1000)} s`;
  if (ms < 7200e3) return `${Math.round(ms / 60e3)} min`;
  return `${Math.round(ms / 3600e3)} h`;
}
function count(v) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (v >= size) return `${digits(v / size)} ${unit}`;
  return `${v}`;
}
const share = (v) => (v === null || v === undefined ? "–" : digits(v));
const percent = (v) => (v === null || v === undefined ? "–" : `${digits(v * 100)} %`);
const clock = (us) => new Date(us / 1000).toLocaleTimeString([], { hour12: false });
/** The strategies of a plan's text, each for some buckets in turn, as `2x none/dense-ring | fp16/dense-ring`. */
const runsOf = (plan) => plan.split(" | ").map((run) => {
  const counted = /^(\d+)x (.*)$/.exec(run);
  return { buckets: counted ? Number(counted[1]) : 1, strategy: counted ? counted[2] : run };
});
/** The parts of a strategy's text, `COMPRESSOR/COLLECTIVE[:SELECTION]`, of a plan those of its last bucket; `family` is the compressor
    without its ratio, `cr` null where it keeps no share of the values. */
const partsOf = (strategy) => {
  // Reports that earlier builds stored hold objects, whose compressors had error feedback.
  const old = typeof strategy === "object" && strategy.compressor !== "none" ? `${strategy.compressor}(k=${strategy.cr})+ef(vanilla)` : "none";
  const text = typeof strategy === "object" ? `${old}/${strategy.collective}${strategy.selection ? `:${strategy.selection}` : ""}` : runsOf(strategy).at(-1).strategy;
  const [spec, how] = text.split(/\/(?=[^/]*$)/);
  const [collective, selection] = how.split(":");
  const kept = /\bk=(0\.\d+|\d(?:\.\d+)?e-\d+)/.exec(spec);
  const family = kept ? spec.replace(kept[0], "k=*") : spec;
  return { spec, family, collective, selection, dense: spec === "none", cr: spec === "none" ? 1 : kept ? Number(kept[1]) : null };
};
/** Without what most have: the ratio has a column of its own, and error feedback is ef(vanilla) if nothing else is said. */
const compressorWords = (parts) => parts.family.replace("(k=*)", "").replace("+ef(vanilla)", "");
const strategyWords = (text) => {
  const runs = typeof text === "string" ? runsOf(text) : [];
  if (runs.length > 1) {
    return runs.map((run, at) => {
      const { cr, dense } = partsOf(run.strategy);
      const what = `${dense ? "dense over " : cr === null ? "" : `${share(cr)} `}${strategyWords(run.strategy)}`;
      return at + 1 === runs.length ? `then ${what}` : `${run.buckets} ${run.buckets === 1 ? "bucket" : "buckets"} ${what}`;
    }).join(", ");
  }
  const parts = partsOf(text);
  return parts.dense ? parts.collective : `${compressorWords(parts)} over ${parts.collective}${parts.selection ? ` (${parts.selection})` : ""}`;
};

// ---- fetching ----
/** The controller did not answer; any other error is the page's own. */
class Unanswered extends Error {}
async function get(path) {
  const answer = await fetch(path, { cache: "no-store" }).catch((error) => { throw new Unanswered(`${path}: ${error.message}`); });
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Unanswered(`${path}: ${answer.status}`);
  return answer.json();
}

async function look() {
  if (state.busy || document.hidden) return;
  state.busy = true;
  try {
    const [nodes, links, jobs, scenario, rejected] = await Promise.all(["nodes", "links", "jobs", "scenario", "rejected-reports"].map((p) => get(`/api/v1/${p}`)));
    state.jobs = jobs;
    if (!jobs.some((j) => j.job === state.job)) choose(jobs.length ? (jobs.find((j) => j.live_ranks > 0) || jobs[0]).job : "");
    showJobs(jobs);
    showNodes(nodes);
    showLinks(nodes, links);
    showScenario(scenario);
    showFoot(rejected);
    await showJob(jobs.find((j) => j.job === state.job));
    connection(true);
  } catch (error) {
    connection(false, error);
  } finally {
    state.busy = false;
  }
}

function connection(ok, error) {
  const chip = $("link");
  chip.className = `chip state ${ok ? "ok" : "lost"}`;
  const lost = error instanceof Unanswered ? "controller unreachable, trying again" : `this page failed: ${error}`;
  chip.textContent = ok ? "live" : lost;
  chip.title = error ? String(error) : "";
}

function choose(job) {
  if (state.job !== job) Object.assign(state, { version: null, applied: null, open: new Set() });
  state.job = job;
  address();
}

function address() {
  const open = state.open.size ? `/${Math.max(...state.open)}` : "";
  history.replaceState(null, "", state.job ? `#${encodeURIComponent(state.job)}${open}` : "#");
}

// ---- parts ----
function showJobs(jobs) {
  const button = (j) => el("button", {
    type: "button", "aria-current": String(j.job === state.job), class: j.live_ranks ? "" : "ended",
    title: j.ended ? endWords(j.ended) : `${j.live_ranks} of ${j.world} ranks connected`, onclick: () => { choose(j.job); look(); },
  }, j.job);
  $("jobs").replaceChildren(...jobs.slice(0, 12).map(button));
}

function showScenario(scenario) {
  const chip = $("scenario");
  chip.hidden = !scenario || !scenario.set;
  if (chip.hidden) return;
  const { set, in_force: follow, refused } = scenario;
  chip.textContent = `${set.label}: ${micros(set.latency_us)}, ${rate(set.bandwidth_bps)}${refused.length ? ` · ${refused.length} refused` : ""}`;
  chip.title = [`in force on ${follow.join(", ") || "no node yet"}`, ...refused.map(([n, why]) => `${n}: ${why}`)].join("\n");
}

const hostWords = ({ host, addr, round_trip_us, loss }) => `${host}${addr && addr !== host ? ` ${addr}` : ""}: ${loss === null ? "not pinged yet" : round_trip_us === null ? "no answer" : micros(round_trip_us)}${loss ? `, ${percent(loss)} lost` : ""}`;

function showNodes(nodes) {
  $("nodes-sub").textContent = `${nodes.filter((n) => n.live).length} of ${nodes.length} agents alive`;
  if (!nodes.length) return $("nodes").replaceChildren(el("div", { class: "none" }, "No agent has registered yet."));
  const row = (n) => el("tr", {},
    el("td", {}, el("i", { class: n.live ? "dot live" : "dot" }), n.node),
    el("td", { class: "soft" }, n.addr),
    el("td", { class: "soft" }, `${ago(n.heartbeat_age_ms)} ago`),
    el("td", { class: "soft" }, ...n.hosts.map((host) => el("div", {}, hostWords(host)))),
    el("td", { class: "num soft" }, n.spooled ? `${n.spooled} waiting` : ""),
    el("td", { class: "faint num" }, n.may_shape ? "shapes its link" : ""));
  const head = el("tr", {}, ...["Node", "Address", "Heartbeat", "Gateway and hosts", "", ""].map((t) => el("th", {}, t)));
  $("nodes").replaceChildren(el("table", { class: "list" }, el("thead", {}, head), el("tbody", {}, ...nodes.map(row))));
}

/** From green for the fastest link to red for one that is 8 times slower (or the slowest, if slower still). */
function heat(value, low, high) {
  const span = Math.log(Math.max(high / low, 8));
  const t = Math.max(0, 1 - Math.log(high / value) / span);
  return `color-mix(in oklab, hsl(${(8 + 140 * t).toFixed(0)} 62% 50%) 24%, var(--card))`;
}

function showLinks(nodes, links) {
  const names = nodes.map((n) => n.node).filter((n) => links.some((l) => l.from === n || l.to === n)).slice(0, 24);
  if (!names.length) return $("links").replaceChildren(el("div", { class: "none" }, "No link has been measured yet. Agents report their first estimates within seconds of registering."));
  const rates = links.map((l) => l.bandwidth_bps).filter((b) => b > 0);
  const [low, high] = [Math.min(...rates), Math.max(...rates)];
  const by = new Map(links.map((l) => [`${l.from}\n${l.to}`, l]));
  const cell = (from, to) => {
    if (from === to) return el("td", { class: "self" });
    const l = by.get(`${from}\n${to}`);
    if (!l) return el("td", { class: "unknown" }, "–");
    const td = el("td", {}, el("b", {}, rate(l.bandwidth_bps)), el("span", {}, micros(l.latency_us)), el("span", { class: "faint" }, l.bandwidth_bps ? `${ago(l.bandwidth_age_ms)} ago` : ""));
    if (l.bandwidth_bps) td.style.background = heat(l.bandwidth_bps, low, high);
    td.title = `${from} to ${to}\nlatency ${micros(l.latency_us)} ± ${micros(l.jitter_us)}, ${ago(l.latency_age_ms)} old, confidence ${share(l.latency_confidence)}\n` +
      (l.bandwidth_bps ? `bandwidth ${rate(l.bandwidth_bps)} by a throughput test ${ago(l.bandwidth_age_ms)} ago` : "no throughput test yet") + `\nloss ${percent(l.loss_out)} out, ${percent(l.loss_back)} back`;
    return td;
  };
  const head = el("tr", {}, el("th", {}), ...names.map((n) => el("th", { scope: "col" }, n)));
  const rows = names.map((from) => el("tr", {}, el("th", { class: "row", scope: "row" }, from), ...names.map((to) => cell(from, to))));
  $("links").replaceChildren(el("table", { class: "matrix" }, el("thead", {}, head), el("tbody", {}, ...rows)));
}

function showFoot(rejected) {
  const total = rejected.reduce((sum, a) => sum + a.count, 0);
  const foot = [el("a", { href: "/api/v1/openapi.json" }, "REST"), el("a", { href: "/metrics" }, "metrics")];
  if (total) foot.push(el("span", { title: rejected.map((a) => `${a.reason}: ${a.count} (${a.last_detail})`).join("\n") }, `${total} reports rejected: ${rejected.map((a) => `${a.count} ${a.reason}`).join(", ")}`));
  $("foot").replaceChildren(...foot);
}

async function showJob(job) {
  // Another run under the same name has curves and decisions of its own.
  const run = job ? job.run : null;
  if (state.run !== run) Object.assign(state, { run, version: null, applied: null });
  $("empty").hidden = Boolean(job);
  for (const id of ["job", "history-card"]) $(id).hidden = !job;
  $("trials-head").hidden = !job;
  if (!job) return ["trials", "experiments"].forEach((id) => $(id).replaceChildren());
  const base = `/api/v1/jobs/${encodeURIComponent(job.job)}`;
  const parts = ["decision", `intervals?limit=${INTERVALS}`, "trials?limit=5", "report", "progress?limit=1000", "experiments"];
  const [decision, intervals, trials, report, progress, experiments] = await Promise.all(parts.map((p) => get(`${base}/${p}`)));
  const newest = (intervals || []).at(-1);
  showNow(decision, report, newest, job);
  $("now-policy").replaceChildren(...policyWords(job));
  showEnd(job.ended);
  showMissing(job.missing);
  showDoubted(job.doubted);
  showTiles(job, newest);
  showCharts(intervals || [], progress || []);
  showTrials(trials || []);
  showExperiments(experiments || []);
  const changed = decision && (decision.version !== state.version || decision.applied_at_step !== state.applied);
  if (changed || !decision) showHistory((decision && await get(`${base}/history?limit=${HISTORY}`)) || []);
  if (decision) Object.assign(state, { version: decision.version, applied: decision.applied_at_step });
}

function showNow(decision, report, newest, { missing }) {
  const dense = !decision || partsOf(decision.strategy).dense;
  const byBucket = decision && runsOf(decision.strategy).length > 1;
  $("now-cr").textContent = decision ? (byBucket ? "By bucket" : dense ? "Dense" : decision.cr === 1 ? decision.compressor : `CR ${share(decision.cr)}`) : "Not decided yet";
  $("now-how").textContent = decision ? strategyWords(decision.strategy) : newest ? `${strategyWords(newest.strategy)} until then` : "dense-ring until then";
  const where = decision && decision.applied_at_step !== null ? `from step ${decision.applied_at_step}` : missing.some((m) => m.ranks.includes(0) && m.node) ? "cannot reach the job: rank 0's node is missing" : "on its way to the ranks";
  $("now-since").textContent = decision ? `since ${clock(decision.since_us)}, decision ${decision.version}, ${where}` : "";
  const waiting = (report && report.waiting) || [];
  $("now-why").textContent = decision ? decision.reason : waiting.join("; ");
  const last = report && report.report;
  $("now-look").replaceChildren(...(last && last.why ? [el("b", {}, `Last look, ${ago(Math.max(0, Date.now() - report.at_us / 1000))} ago: `), last.why] : []));
}

/** What is set for the job alone and by whom, in words. */
function policyWords({ policy, policy_source: source }) {
  const { kinds, objective, least_gain: gain, most_overhead: overhead, observe, pin } = policy;
  const parts = [
    observe && "observes only, nothing changes",
    pin && `pinned to ${strategyWords(pin.strategy)} until ${pin.until || "this is changed"}`,
    objective && `ranks by ${objective.name}`,
    gain !== undefined && `keeps a gain of ${share(gain)} at least`,
    overhead !== undefined && `compresses for ${percent(overhead)} of a step at most`,
    kinds && `uses ${kinds.join(", ")} alone`,
  ].filter(Boolean);
  return parts.length ? [el("b", {}, `Set by the ${source}: `), parts.join("; ")] : [];
}

/** When and how a run ended, in words. */
function endWords(ended) {
  const words = {
    left: "every rank said goodbye", "connection-lost": "a trainer's connection ended without a goodbye: it crashed or was killed",
    "agents-silent": "its agents were silent for too long; what became of its trainers is not known", replaced: "another run began under its name",
  };
  return `Ended ${ago(Math.max(0, Date.now() - ended.at_us / 1000))} ago: ${words[ended.how] || "how is not known"}.`;
}

function showEnd(ended) {
  $("ended").hidden = !ended;
  $("ended").textContent = ended ? endWords(ended) : "";
}

/** Which nodes no agent shows, since when, and what that means for the job. */
function showDoubted(doubted) {
  $("doubted").hidden = !doubted.length;
  $("doubted").replaceChildren(...doubted.map((d) => el("p", {}, el("b", {}, "Not counted: "), d.what)));
}

function showMissing(missing) {
  const line = (m) => el("p", {}, el("b", {}, `${m.node ? `Node ${m.node} is missing` : "Ranks are missing"}, ${ago(Math.max(0, Date.now() - m.since_us / 1000))}: `), m.meaning);
  $("missing").hidden = !missing.length;
  $("missing").replaceChildren(...missing.map(line));
}

function showTiles(job, newest) {
  const off = (measured, predicted) => (measured && predicted ? `predicted ${micros(predicted)}` : "no prediction yet");
  const tile = (name, value, note) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("span", { class: "note", title: note }, note)));
  $("tiles").replaceChildren(
    tile("Step", micros(job.step_us), off(job.step_us, job.predicted_step_us)),
    tile("Collective", micros(job.sync_us), off(job.sync_us, job.predicted_sync_us)),
    tile("Compute", micros(job.compute_us), `compression ${micros(job.comp_us)}`),
    tile("Gain", share(job.gain), "gradient energy kept"),
    tile("Sent", newest && newest.bytes_sent !== null ? `${count(Math.round(newest.bytes_sent))}B` : "–", newest ? `per rank and step, ${strategyWords(newest.strategy)}` : "per rank and step"),
    tile("Ranks", `${job.live_ranks} / ${job.world}`, `${new Set(job.nodes.filter(Boolean)).size} nodes, ${job.backend}`),
    tile("Steps", String(job.step), `${count(job.gradient_values)} values each`),
    tile("Loss", share(job.loss), "newest"),
    tile("Accuracy", percent(job.accuracy), "held out, newest"));
}

function keys(box, series) {
  const head = box.previousElementSibling;
  const old = head.querySelector(".key");
  const key = el("span", { class: "key" }, ...series.map((s) => el("span", {}, el("i", { class: `s-${s.style}` }), s.name)));
  if (old) old.replaceWith(key); else head.append(key);
}

function showCharts(intervals, progress) {
  const marks = intervals.filter((v, i) => i && v.version !== intervals[i - 1].version).map((v) => ({ x: v.from_step, label: `v${v.version}` }));
  const common = { marks, nameX: "step", formatX: (v) => String(Math.round(v)), format: seconds, empty: "Shows up after the first ten steps that every rank reported whose agent lives." };
  const times = (measured, predicted) => [
    { name: "measured", style: "measured", points: intervals.map((v) => [v.to_step, v[measured] / 1e6]) },
    { name: "predicted", style: "predicted", dash: true, points: intervals.map((v) => [v.to_step, v[predicted] === null ? null : v[predicted] / 1e6]) },
  ];
  const draw = (id, series, options) => { keys($(id), series); if (!$(id).matches(":hover")) lineChart($(id), series, options); };
  draw("chart-sync", times("measured_sync_us", "predicted_sync_us"), common);
  draw("chart-step", times("measured_step_us", "predicted_step_us"), common);
  draw("chart-cr", [{ name: "CR", style: "measured", steps: true, points: intervals.map((v) => [v.to_step, partsOf(v.strategy).cr]) }], { ...common, log: true, format: share });
  const loss = progress.filter((p) => p.loss !== null);
  const accuracy = progress.filter((p) => p.accuracy !== null);
  const training = [{ name: "loss", style: "measured", points: loss.map((p) => [p.step, p.loss]) }];
  if (accuracy.length) training.push({ name: "accuracy", style: "third", right: true, points: accuracy.map((p) => [p.step, p.accuracy]) });
  draw("chart-loss", training, { ...common, format: share, formatRight: percent, empty: "The trainers have reported no loss yet." });
}

/** The range of gains of each compressor, of one rank that selects for all apart from ranks that select for themselves. */
function gains(outcomes) {
  const by = new Map();
  const selector = (parts) => compressorWords(parts) + (parts.selection ? `:${parts.selection}` : "");
  for (const { strategy, gain } of outcomes) {
    const parts = partsOf(strategy);
    by.set(selector(parts), [...(by.get(selector(parts)) || []), { gain, cr: parts.cr }]);
  }
  const at = ({ gain, cr }) => share(gain) + (cr === null ? "" : ` at ${share(cr)}`);
  return [...by].map(([name, found]) => {
    found.sort((a, b) => a.cr - b.cr);
    return `${name} ${at(found[0])}` + (found.length > 1 ? ` to ${at(found[found.length - 1])}` : "");
  }).join("; ");
}

function showTrials(trials) {
  if (!trials.length) return $("trials").replaceChildren(el("div", { class: "none" }, "No trial has been asked for yet."));
  const row = (t) => el("tr", {},
    el("td", {}, `#${t.id}`), el("td", {}, el("span", { class: `tag ${t.state}` }, t.state)),
    el("td", { class: "soft wrap" }, t.outcomes.length ? gains(t.outcomes) : `${t.candidates.length} candidates`),
    el("td", { class: "faint", title: t.aborted || t.outcomes.map((o) => `${strategyWords(o.strategy)} at ${share(partsOf(o.strategy).cr)}: gain ${share(o.gain)}${o.shadow_gain == null ? "" : ` (in the long run ${share(o.shadow_gain)})`}, compression ${micros(o.comp_us)}, collective ${micros(o.sync_us)}`).join("\n") }, t.aborted ? "hover for why" : `${t.outcomes.length} of ${t.candidates.length} ran`));
  const head = el("tr", {}, ...["Trial", "", "Gain", ""].map((t) => el("th", {}, t)));
  $("trials").replaceChildren(el("table", { class: "list" }, el("thead", {}, head), el("tbody", {}, ...trials.map(row))));
}

// ---- what experiments took ----
const EXPERIMENTS = { "throughput-test": "throughput tests", "live-trial": "live trials, in place of steps", "shadow-trial": "shadow trials, in steps" };

function showExperiments(experiments) {
  const row = (e) => el("tr", {},
    el("td", {}, EXPERIMENTS[e.kind] || e.kind), el("td", { class: "num" }, `${e.count}`),
    el("td", { class: "num" }, seconds(e.seconds)), el("td", { class: "num" }, percent(e.share)),
    el("td", { class: "num" }, e.bytes === null ? "not counted" : `${count(e.bytes)}B`), el("td", { class: "num" }, e.cpu_s === null ? "not counted" : seconds(e.cpu_s)));
  const head = el("tr", {}, el("th", {}, "Experiments"), ...["", "Took", "Of the run", "Sent", "Processor"].map((t) => el("th", { class: "num" }, t)));
  $("experiments").replaceChildren(...(experiments.length ? [el("table", { class: "list" }, el("thead", {}, head), el("tbody", {}, ...experiments.map(row)))] : []));
}

// ---- history ----
function facts(pairs) {
  return el("dl", { class: "facts" }, ...pairs.filter((p) => p[1]).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function alternatives(report) {
  const all = (report.alternatives || []).slice(0, 24);
  const most = Math.max(...all.map((a) => a.t_step_s), 0);
  const head = el("tr", {}, ...["Strategy", "CR"].map((t) => el("th", {}, t)), ...["Compression", "Collective", "Step", "Gain", "Saves", "Probability", ""].map((t) => el("th", { class: "num" }, t)));
  const row = (a) => {
    const s = a.strategy;
    const same = JSON.stringify(s) === JSON.stringify(report.chosen);
    const bar = el("i", {});
    bar.style.width = `${most ? (56 * a.t_step_s) / most : 0}px`;
    return el("tr", { class: same ? "chosen" : a.score === null ? "off" : "" },
      el("td", {}, strategyWords(s)), el("td", {}, share(partsOf(s).cr)),
      el("td", { class: "num" }, seconds(a.t_comp_s)), el("td", { class: "num" }, seconds(a.t_sync_s)),
      el("td", { class: "num bar-cell" }, seconds(a.t_step_s), bar), el("td", { class: "num" }, share(a.gain)),
      el("td", { class: "num" }, a.score === null ? "–" : percent(a.saves)), el("td", { class: "num" }, a.score === null ? "–" : percent(a.sure)),
      el("td", {}, same ? el("span", { class: "tag" }, "chosen") : a.score === null ? "not admitted" : a.on_front ? "on the front" : ""));
  };
  return el("div", { class: "scroll" }, el("table", { class: "list alts" }, el("thead", {}, head), el("tbody", {}, ...all.map(row))));
}

function detail(entry) {
  const r = entry.report || {};
  const seen = r.seen || {};
  const link = (l) => (l ? `${seconds(l.alpha_mean_s)} mean, ${seconds(l.alpha_worst_s)} worst; ${rate(l.bandwidth_mean_bps)} mean, ${rate(l.bandwidth_worst_bps)} worst` : "");
  const m = seen.measured;
  return el("div", { class: "detail" },
    facts([
      ["Changed since the decision before", r.changed],
      ["Links then", link(seen.links)],
      ["Links at the decision before", link(seen.links_before)],
      ["Measured under the one before", m ? `step ${seconds(m.t_step)}, collective ${seconds(m.t_sync)}, gain ${share(m.gain)} over ${m.steps} steps` : ""],
      ["Compute", seen.compute_s ? seconds(seen.compute_s) : ""],
      ["Policy", r.policy],
      ["A saving counts for", r.horizon_s ? seconds(r.horizon_s) : ""],
      ["A throughput test would save", r.test_worth_s ? seconds(r.test_worth_s) : ""],
      ["Gain and compression time", seen.profile_measured ? "from trials" : "assumed, no trial yet"],
      ["Made from", `decision ${entry.parent}`],
    ]),
    alternatives(r));
}

function showHistory(entries) {
  const item = (entry, index) => {
    const { dense, cr } = partsOf(entry.strategy);
    const what = el("span", { class: "what" }, el("em", {}, `v${entry.version}`), runsOf(entry.strategy).length > 1 ? "by bucket" : dense ? entry.collective : `${cr === null ? entry.compressor : share(cr)} ${entry.collective}`);
    const step = entry.applied_at_step === null ? "not in force on every rank" : `from step ${entry.applied_at_step}`;
    const summary = el("summary", {}, what, el("span", { class: "reason" }, entry.reason), el("span", { class: "when" }, `${clock(entry.since_us)} · ${step}`));
    const box = el("details", {}, summary);
    const fill = () => { if (box.open && box.children.length === 1) box.append(detail(entry)); };
    box.addEventListener("toggle", () => { if (box.open) state.open.add(entry.version); else state.open.delete(entry.version); address(); fill(); });
    box.open = state.open.has(entry.version);
    fill();
    return el("li", { class: index === 0 ? "current" : "" }, box);
  };
  const none = el("li", {}, el("span", { class: "soft" }, "Nothing has been decided yet; the last look above says what is waited for."));
  $("history").replaceChildren(...(entries.length ? entries.map(item) : [none]));
}

look();
setInterval(look, LOOK_MS);
// replaceState, by which the page writes its own address, does not come here.
addEventListener("hashchange", () => { Object.assign(state, addressed(), { version: null, applied: null }); look(); });
addEventListener("visibilitychange", look);

"use strict";
// The page of a run. The data is compressed JSON; samples of a step are unpacked when the step is chosen.

const el = (id) => document.getElementById(id);
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const short = (x) => (x === null || x === undefined ? "–" : Number.isInteger(x) ? String(x) : Math.abs(x) < 1e-4 ? x.toExponential(1) : String(+x.toPrecision(4)));
const percent = (x) => (100 * x).toFixed(1) + " %";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const COLOURS = {
  generate: "#3b82c4", train: "#d9772b", "log-probs": "#e8b04a", refit: "#7d5bbf", prepare: "#b98d6e", validation: "#4aa3a0",
  checkpoint: "#8a6d9e", "wait for rewards": "#c9606b", "wait for samples": "#b9bfca", "wait for training": "#9aa2b1",
  other: "#6b7280", reward: "#c9606b", logprobs: "#e8b04a",
};
const colourOf = (what) => COLOURS[what] || COLOURS[what.split("/")[0]] || "#6b7280";
const LINES = ["#2f7fd6", "#e07b2c", "#3f9a5f", "#b0456f", "#7d5bbf", "#8a6a3a", "#4aa3a0", "#6b7280"];
const MAIN = [
  ["train/reward", "validation/reward"], ["validation/accuracy", "train/accuracy"], ["train/generated_length"],
  ["train/entropy", "train/approx_entropy"], ["train/kl_penalty", "train/kl_in_reward", "train/gen_kl_error"],
  ["train/token_mult_prob_error"], ["train/grad_norm"], ["train/loss"], ["validation/val_loss"], ["validation/loss"],
  ["train/rewards_margin_mean"], ["validation/rewards_margin_mean"], ["train/lr"], ["train/trajectory_age_mean"],
  ["train/truncation_rate"], ["train/zero_advantage_rate"], ["train/tokens_per_second"],
];

const WORDS = { // metrics and columns by the last part of their name
  reward: "Mean reward of the samples: what the environment pays for an answer.",
  accuracy: "Share of the samples that are solved, where rewards are 0 or 1 or the environment says from which reward on.",
  generated_length: "Mean number of tokens of an answer.",
  entropy: "How undecided the policy is about the next token. Near 0 it always answers alike.",
  approx_entropy: "How undecided the policy is about the next token, estimated from the sampled tokens. Near 0 it always answers alike.",
  kl_penalty: "Distance of the policy from the reference model, as the loss counts it.",
  kl_in_reward: "Distance of the policy from the reference model, taken off the reward.",
  gen_kl_error: "Distance between the engine that generated and the policy that trains, under the same weights.",
  token_mult_prob_error: "By what factor engine and policy differ in the probability of a token. 1 is equal, up to 1.05 is usual.",
  grad_norm: "Length of the gradient before it is clipped. 0: nothing is learned; spikes: the step was too large.",
  loss: "What the optimizer lowers. In GRPO its value says little: look at the reward.",
  val_loss: "Loss on the held-out examples. Lower is better.",
  rewards_margin_mean: "How much more the policy prefers the chosen answer than the rejected one, compared with the reference.",
  lr: "Learning rate of the step.",
  trajectory_age_mean: "How many updates older the weights were that generated a token than those that train on it.",
  truncation_rate: "Share of the answers that were cut off by the length limit.",
  zero_advantage_rate: "Share of the samples whose group has equal rewards: they teach nothing.",
  tokens_per_second: "Tokens of prompts and answers that are trained on, per second.",
  advantage: "How much better than its group a sample did. Above 0 it is made likelier, below 0 less likely.",
  mismatch: "Mean of exp|log-prob of the policy - of the engine| - 1 over the tokens of the answer. 0 is equal.",
};
const explained = (name, shown = name) => {
  const words = WORDS[name.split("/").at(-1)];
  return words ? `<span class="word" data-tip="${escaped(words)}">${escaped(shown)}</span>` : escaped(shown);
};

let data = null;
const loaded = {}, parts = {}, pictures = {}; // by kind and step: the samples, and a sentence if some are missing; images by digest
let missing = 0; // steps whose samples are not in the page
let charts = [];

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// A tip under the pointer, for elements with data-tip.
const tip = document.body.appendChild(Object.assign(document.createElement("div"), { id: "tip" }));
document.addEventListener("pointermove", (event) => {
  const over = event.target.closest && event.target.closest("[data-tip]");
  tip.style.display = over ? "block" : "none";
  if (!over) return;
  tip.textContent = over.dataset.tip;
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
});

// Head and alarms, of each run its own.
function showHead() {
  const several = data.heads.length > 1;
  el("heads").innerHTML = data.heads.map(({ name, state: s, headline: h }) => {
    const steps = s.max_steps ? `${s.steps} of ${s.max_steps} steps` : `${s.steps} steps`;
    const main = h ? `<p class="headline">${explained(h.metric)} <b>${short(+h.before.toPrecision(3))}</b> &rarr; <b>${short(+h.after.toPrecision(3))}</b> <small>step ${h.steps[0]} to ${h.steps[1]}</small></p>` : "";
    return `<div class="head">${several ? `<h3>${escaped(name)}</h3>` : ""}${main}<p class="state"><b>${escaped(s.model || "")}</b> · ${s.algorithm.toUpperCase()}, ${steps} of ${escaped(s.step_size)} · ${escaped(s.end)} · page made ${s.made} from <code>${escaped(s.folder)}</code></p></div>`;
  }).join("");
  const quiet = several && data.heads.every(({ alarms }) => !alarms.length);
  const heads = quiet ? data.heads.slice(0, 1) : data.heads; // one line says it of all
  if (several) document.querySelectorAll("h2 .of-run").forEach((span) => { span.textContent = ` of ${data.heads[0].name}`; });
  el("alarm-list").innerHTML = heads.map(({ name, state: s, alarms }) => (several && !quiet ? `<h3>${escaped(name)}</h3>` : "") + "<ul>" + (alarms.length
    ? alarms.map((a) => `<li class="${a.grave ? "grave" : ""}">${escaped(a.text)}<small>first: ${escaped(a.help)}</small></li>`).join("")
    : `<li class="none">None${quiet ? ` in any of the ${data.heads.length} runs` : ""}: ${s.rewarded ? "rewards, entropy, mismatch, gradients" : "loss, gradients"} and devices look as they should.</li>`) + "</ul>").join("");
}

// The runs beside each other, best first.
function showStandings() {
  const lines = data.standings;
  if (!lines.length) return;
  const keys = Object.keys(lines[0].settings);
  const cells = (line) => [line.name, line.state, `${line.step}${line.max_steps ? "/" + line.max_steps : ""}`, short(line.score), line.metric, line.hours.toFixed(2), ...keys.map((key) => line.settings[key])];
  const row = (tag, values) => `<tr>${values.map((value) => `<${tag}>${escaped(value)}</${tag}>`).join("")}</tr>`;
  el("standings").innerHTML = "<table>" + row("th", ["run", "state", "step", "score", "of", "hours", ...keys]) +
    lines.map((line) => row("td", cells(line))).join("") + "</table>";
}

// Curves.
function smoothed(values, weight) {
  let total = 0, sum = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    total = weight * total + (1 - weight) * value;
    sum = weight * sum + (1 - weight);
    return total / sum;
  });
}

function faded(colour) { return colour + "66"; }

function around(_, low, high) { // a flat curve is in the middle, not at the edge of 0 .. 100
  if (low === null) return [0, 1];
  const room = high > low ? 0.08 * (high - low) : Math.max(0.1, 0.05 * Math.abs(high));
  return [low - room, high + room];
}

// How far a metric moves: from the mean of its first fifth to that of its last, in units of its noise; -1: it is flat.
function movement(name) {
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  return Math.max(...data.runs.map((run) => {
    const values = (run.curves[name]?.[1] || []).filter((value) => value !== null);
    if (!values.length) return -1;
    const low = Math.min(...values), high = Math.max(...values);
    if (high - low <= 1e-3 * Math.max(Math.abs(low), Math.abs(high)) || values.length < 2) return -1;
    const fifth = Math.max(1, Math.floor(values.length / 5));
    const jumps = values.slice(1).map((value, i) => Math.abs(value - values[i]));
    return Math.abs(mean(values.slice(-fifth)) - mean(values.slice(0, fifth))) / (mean(jumps) + 1e-12);
  }));
}

function drawChart(name, place) {
  const sets = data.runs.map((run) => run.curves[name]).filter(Boolean);
  if (!sets.length) return;
  const box = el(place).appendChild(document.createElement("div"));
  box.className = "chart";
  const last = data.heads.length === 1 && data.runs[0].curves[name];
  box.innerHTML = `<h4>${explained(name, name.replace("train/", ""))} <span>${last ? "last " + short(last[1].at(-1)) : ""}</span></h4>`;
  const steps = [...new Set(sets.flatMap((set) => set[0]))].sort((a, b) => a - b);
  const along = (set, which) => {
    const at = new Map(set ? set[0].map((step, i) => [step, set[which][i]]) : []);
    return steps.map((step) => (at.has(step) ? at.get(step) : null));
  };
  const rows = data.runs.map((run) => along(run.curves[name], 1));
  // Of several runs with one curve: the highest and the lowest, with a band between them.
  const edges = data.runs.map((run) => (run.curves[name]?.length === 4 ? [along(run.curves[name], 3), along(run.curves[name], 2)] : []));
  const sparse = steps.length < 30; // a few points are not smoothed
  const columns = (weight) => [steps, ...rows.flatMap((row, i) => [row, ...[row, ...edges[i]].map((line) => smoothed(line, weight))])];
  const series = [{ label: "step" }], bands = [];
  rows.forEach((_, i) => {
    const label = data.runs.length > 1 ? data.runs[i].name : "value", colour = LINES[i % LINES.length];
    series.push({ label, stroke: faded(colour), width: 1, points: { show: sparse, size: 4, stroke: colour }, spanGaps: true });
    series.push({ label: "smoothed", stroke: colour, width: 2, points: { show: false }, spanGaps: true });
    edges[i].forEach((_, which) => series.push({ label: which ? "lowest" : "highest", width: 0, points: { show: false }, spanGaps: true }));
    if (edges[i].length) bands.push({ series: [series.length - 2, series.length - 1], fill: colour + "33" });
  });
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") }, font: "11px system-ui" };
  const values = (_, ticks) => ticks.map((tick) => short(tick));
  charts.push({ sparse, columns, plot: new uPlot({
    width: box.clientWidth - 12, height: 190, series, bands, scales: { x: { time: false }, y: { range: around } }, cursor: { sync: { key: "steps" } },
    axes: [{ ...axis, size: 30 }, { ...axis, size: 60, values }], legend: { show: false },
  }, columns(sparse ? 0 : +el("smooth").value), box) });
}

function drawCharts() {
  charts.forEach((chart) => chart.plot.destroy());
  charts = [];
  el("charts").innerHTML = el("flat-charts").innerHTML = "";
  el("which").innerHTML = data.runs.length > 1 ? data.runs.map((run, i) => `<span><b style="background:${LINES[i % LINES.length]}"></b>${escaped(run.name)}</span>`).join("") : "";
  const has = (name) => data.runs.some((run) => run.curves[name]);
  const wanted = el("metric-search").value.trim();
  const names = wanted
    ? [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))].filter((name) => name.includes(wanted)).slice(0, 24)
    : MAIN.flatMap((options) => (options[0].startsWith("validation") || options[1]?.startsWith("validation") ? options.filter(has) : [options.find(has)])).filter(Boolean);
  const headline = data.heads[0].headline?.metric;
  const moves = new Map([...new Set(names)].map((name) => [name, movement(name)]));
  const flat = wanted ? [] : [...moves.keys()].filter((name) => moves.get(name) < 0);
  const first = [...moves.keys()].filter((name) => !flat.includes(name))
    .sort((a, b) => (b === headline) - (a === headline) || (moves.get(b) > 2) - (moves.get(a) > 2));
  first.forEach((name) => drawChart(name, "charts"));
  el("flat").hidden = !flat.length;
  el("flat").firstElementChild.textContent = `${flat.length} curve${flat.length > 1 ? "s that do" : " that does"} not move: ${flat.map((name) => name.replace("train/", "")).join(", ")}`;
  if (el("flat").open) flat.forEach((name) => drawChart(name, "flat-charts"));
}

// Ledger of device-seconds.
function bar(seconds, total) {
  return `<div class="bar">${data.ledger.order.filter((what) => seconds[what]).map((what) =>
    `<i style="width:${(100 * seconds[what]) / total}%;background:${colourOf(what)}" data-tip="${what}: ${short(seconds[what])} s, ${percent(seconds[what] / total)}"></i>`).join("")}</div>`;
}

function showLedger() {
  const { devices, wall, order, steps } = data.ledger;
  const names = Object.keys(devices);
  if (!names.length) { el("ledger-text").textContent = "The run wrote no events."; return; }
  const sums = {};
  names.forEach((name) => order.forEach((what) => { sums[what] = (sums[what] || 0) + (devices[name][what] || 0); }));
  const all = Object.values(sums).reduce((a, b) => a + b, 0);
  const present = order.filter((what) => sums[what]);
  el("ledger-text").innerHTML = `${short(wall)} s × ${names.length} device${names.length > 1 ? "s" : ""} = ${short(wall * names.length)} device-seconds, of which ${percent(all / (wall * names.length))} are accounted for. The start of the processes comes before.`;
  el("ledger").innerHTML =
    `<div class="legend">${present.map((what) => `<span><b style="background:${colourOf(what)}"></b>${what} ${percent(sums[what] / all)}</span>`).join("")}</div>` +
    names.slice(0, 64).map((name) => `<div class="device"><span>${escaped(name)}</span>${bar(devices[name], wall)}</div>`).join("") +
    `<h3>By step</h3><div id="step-bars" style="display:flex;align-items:flex-end;height:110px;gap:1px;overflow:hidden">` +
    stepBars(steps, order) + `</div>`;
  if (data.floor) {
    el("floor").innerHTML = "<h3>Distance to what <code>plan</code> predicts</h3><table><tr><th></th><th>predicted</th><th>measured</th><th>ratio</th></tr>" +
      data.floor.map((row) => {
        const size = (x) => (row.unit === "s" ? short(x) + " s" : short(x / 1e6) + " MB");
        return `<tr><td>${escaped(row.what)}</td><td>${size(row.predicted)}</td><td>${size(row.measured)}</td><td>${row.predicted ? short(row.measured / row.predicted) : "–"}</td></tr>`;
      }).join("") + "</table>";
  }
}

function stepBars(steps, order) {
  const totals = Object.values(steps).map((s) => Object.values(s).reduce((a, b) => a + b, 0));
  const highest = [...totals].sort((a, b) => a - b)[Math.floor(0.98 * (totals.length - 1))] || 1;
  return Object.entries(steps).map(([step, seconds], i) => {
    const what = order.filter((name) => seconds[name]);
    const words = what.map((name) => `${name}: ${short(seconds[name])} s`).join("\n");
    return `<div data-step="${step}" data-tip="step ${step}\n${words}" style="flex:1;cursor:pointer;display:flex;flex-direction:column-reverse;height:${Math.min(100, (100 * totals[i]) / highest)}%">` +
      what.map((name) => `<i style="flex:${seconds[name]};background:${colourOf(name)}"></i>`).join("") + "</div>";
  }).join("");
}

// Timeline of a step.
function showTimeline() {
  const step = el("timeline-step").value, spans = data.timelines[step];
  if (!spans) return;
  const end = Math.max(...spans.map((s) => s[2] + s[3]));
  const rank = (p) => (p === "driver" ? 0 : p.startsWith("policy") ? 1 : p.startsWith("engine") ? 2 : 3);
  const processes = [...new Set(spans.map((s) => s[0]))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }));
  const wide = el("timeline").clientWidth, left = Math.min(150, wide * 0.3), row = 26, high = processes.length * row + 30;
  const x = (t) => left + ((wide - left - 12) * t) / end;
  const parts = [];
  for (let i = 0; i <= 4; i++) {
    const t = (end * i) / 4;
    parts.push(`<line x1="${x(t)}" x2="${x(t)}" y1="0" y2="${high - 24}"/><text x="${x(t)}" y="${high - 8}" text-anchor="${i === 4 ? "end" : i ? "middle" : "start"}">${short(t)} s</text>`);
  }
  processes.forEach((process, i) => {
    parts.push(`<text x="8" y="${i * row + 18}">${escaped(process)}</text>`);
    spans.filter((s) => s[0] === process).sort((a, b) => a[1].split("/").length - b[1].split("/").length).forEach(([, what, start, seconds]) => {
      const depth = 4 * (what.split("/").length - 1);
      parts.push(`<rect x="${x(start)}" y="${i * row + 5 + depth}" width="${Math.max(1, x(start + seconds) - x(start))}" height="${row - 8 - depth}" rx="2" fill="${colourOf(what)}" data-tip="${escaped(process)}: ${escaped(what)}\n${short(seconds)} s, from ${short(start)} s"/>`);
    });
  });
  el("timeline").innerHTML = `<svg height="${high}" viewBox="0 0 ${wide} ${high}">${parts.join("")}</svg>`;
  const last = data.tails[step] || [];
  el("timeline-tail").textContent = last.length
    ? "Ended last, after nine tenths of the samples: " + last.map((s) => `${s.uid}#${s.generation} +${short(s.seconds)} s (${s.turns} turn${s.turns > 1 ? "s" : ""}, ${s.tokens} tokens)`).join(", ")
    : "";
  el("timeline-text").textContent = `${short(end)} s; the policy's ranks do what the driver waits for in train, logprobs, prepare and refit`;
}

function moveStep(by) {
  const select = el("timeline-step");
  select.selectedIndex = Math.max(0, Math.min(select.options.length - 1, select.selectedIndex + by));
  showTimeline();
}

// Samples.
async function keep(kind, step, packed) {
  const found = await unpack(packed), kept = new Set(found.samples.map((sample) => sample.u)).size;
  loaded[kind + step] = found.samples;
  Object.assign(pictures, found.pictures);
  parts[kind + step] = found.prompts > kept ? `${kept} of the ${found.prompts} prompts of this step are in the page. ` : "";
}

window.addSamples = async (kind, step, packed) => {
  await keep(kind, step, packed);
  showSamples();
};

function tokenValues(sample) {
  const n = (sample.e || []).length, errors = [], weights = [];
  for (let i = 0; i < n; i++) {
    const gap = sample.p ? sample.p[i] - sample.e[i] : null;
    errors.push(gap === null ? null : Math.exp(Math.abs(gap)) - 1);
    weights.push(gap === null ? null : Math.exp(gap));
  }
  return { errors, weights };
}

function mismatch(sample) {
  const { errors } = tokenValues(sample);
  return errors.length && errors[0] !== null ? errors.reduce((a, b) => a + b, 0) / errors.length : null;
}

// Mean mismatch of a step's tokens by their place in the sample and by the engine's probability.
const DEPTHS = [0, 16, 64, 256, 1024, 4096, 16384].map((from) => [from, `from token ${from}`]);
const CHANCES = [[0, "below 1e-4"], [1e-4, "1e-4 to 1 %"], [0.01, "1 to 10 %"], [0.1, "10 to 50 %"], [0.5, "50 to 90 %"], [0.9, "90 to 99 %"], [0.99, "above 99 %"]];

function mismatchBins(samples, bins, valueOf) {
  const found = bins.map(([from, name]) => ({ from, name, tokens: 0, sum: 0, largest: 0 }));
  for (const sample of samples) {
    tokenValues(sample).errors.forEach((error, i) => {
      const bin = error === null ? null : found.findLast((b) => valueOf(sample, i) >= b.from);
      if (bin) { bin.tokens += 1; bin.sum += error; bin.largest = Math.max(bin.largest, error); }
    });
  }
  return found.filter((bin) => bin.tokens).map((bin) => ({ ...bin, mean: bin.sum / bin.tokens }));
}

function showMismatch(samples) {
  const tables = [["place", DEPTHS, (_, i) => i], ["engine's probability", CHANCES, (s, i) => Math.exp(s.e[i])]].map(([title, bins, valueOf]) => {
    const found = mismatchBins(samples, bins, valueOf), most = Math.max(...found.map((bin) => bin.mean), 1e-9);
    return found.length && `<table><tr><th style='text-align:left'>${title}</th><th>tokens</th><th>mean</th><th>largest</th><th></th></tr>` + found.map((bin) =>
      `<tr><td style="text-align:left">${bin.name}</td><td>${bin.tokens}</td><td>${short(bin.mean)}</td><td>${short(bin.largest)}</td><td><div class="bar" style="width:8rem"><i style="width:${(100 * bin.mean) / most}%;background:${LINES[0]}"></i></div></td></tr>`).join("") + "</table>";
  });
  el("mismatch").hidden = !tables[0];
  el("mismatch-tables").innerHTML = tables.filter(Boolean).join("");
}

function fillSteps() {
  const kind = el("kind").value, here = data.samples[kind] || {};
  const steps = data.shards[kind].filter((step) => here[step] || data.beside);
  el("sample-step").innerHTML = steps.slice().reverse().map((step) => `<option value="${step}">step ${step}</option>`).join("");
  missing = data.shards[kind].length - steps.length;
  chooseStep();
}

async function chooseStep() {
  const kind = el("kind").value, step = el("sample-step").value;
  if (!step) { el("sample-list").innerHTML = "<p class='hint' style='padding:.6rem'>No samples were recorded (logger.samples).</p>"; el("sample").innerHTML = ""; return; }
  el("sample").innerHTML = "";
  if (loaded[kind + step]) return showSamples();
  const packed = data.samples[kind][step];
  if (packed) { await window.addSamples(kind, step, packed); return; }
  const script = document.createElement("script");
  script.src = `${data.beside}/${kind}_${String(step).padStart(6, "0")}.js`;
  document.body.appendChild(script);
}

function textOf(sample, from, to) { return sample.ids.slice(from, to).map((id) => data.tokens[id] ?? `[${id}]`).join(""); }

// The text of tokens that were not generated, with a picture for the run of each image.
function saidOf(sample, from, to) {
  let at = from, html = "";
  for (const [first, count, digest] of sample.im || []) {
    if (first < from || first >= to) continue;
    const words = `image of ${count} tokens`;
    html += escaped(textOf(sample, at, first)) + (pictures[digest] ? `<img src="${pictures[digest]}" alt="" title="${words}">` : `[${words}]`);
    at = first + count;
  }
  return html + escaped(textOf(sample, at, to));
}

// An example of the data has no reward; a sample without one failed.
function rewardOf(sample) { return sample.r !== null ? short(sample.r) : data.state.rewarded ? "<span class='bad'>failed</span>" : "–"; }

function answerOf(sample) {
  let at = 0;
  const parts = [];
  for (const [, count, generated] of sample.t) { if (generated) parts.push(textOf(sample, at, at + count)); at += count; }
  return parts.join(" … ") || sample.text || "";
}

const FILTERS = {
  all: (list) => list,
  worst: (list) => [...list].sort((a, b) => (a.r ?? -1e9) - (b.r ?? -1e9)),
  best: (list) => [...list].sort((a, b) => (b.r ?? -1e9) - (a.r ?? -1e9)),
  mismatch: (list) => [...list].sort((a, b) => (mismatch(b) ?? -1) - (mismatch(a) ?? -1)),
  truncated: (list) => list.filter((s) => s.cut),
  failed: (list) => list.filter((s) => (s.r === null && data.state.rewarded) || s.left || s.w === 0),
};

function showSamples() {
  const samples = loaded[el("kind").value + el("sample-step").value];
  if (!samples) return;
  showMismatch(samples);
  const rest = missing ? `${missing} more steps are on disk.` : "", part = parts[el("kind").value + el("sample-step").value];
  const how = " grpo-mcore report RUN --samples 12,13 puts chosen steps into the page, --all-samples writes all beside it.";
  el("sample-text").textContent = part || rest ? part + rest + how : "";
  const wanted = el("search").value.toLowerCase();
  const found = FILTERS[el("filter").value](samples).filter((s) =>
    !wanted || [textOf(s, 0, s.ids.length), s.u, s.ans, s.why, s.truth].join("\n").toLowerCase().includes(wanted));
  const ifRewarded = (cell) => (data.state.rewarded ? cell : "");
  const head = `<tr><th>prompt</th>${ifRewarded(`<th>${explained("reward")}</th><th>${explained("advantage")}</th>`)}<th class='wide'>tokens</th>${ifRewarded(`<th class='wide'>${explained("mismatch")}</th>`)}<th class='wide'></th><th style='text-align:left'>answer</th></tr>`;
  el("sample-list").innerHTML = `<table><thead>${head}</thead><tbody>` + found.slice(0, 500).map((s) => {
    const flags = [s.cut && "cut", s.left && "left out", s.w === 0 && "masked"].filter(Boolean).join(", ");
    return `<tr data-index="${samples.indexOf(s)}"><td>${escaped(s.u)}#${s.g}</td>${ifRewarded(`<td>${rewardOf(s)}</td><td>${short(s.a)}</td>`)}<td class="wide">${(s.e || s.p || []).length}</td>${ifRewarded(`<td class="wide">${short(mismatch(s))}</td>`)}<td class="wide hint">${flags}</td><td class="text">${escaped(answerOf(s).slice(0, 200))}</td></tr>`;
  }).join("") + `</tbody></table>${found.length ? "" : "<p class='hint' style='padding:.6rem'>No sample fits.</p>"}`;
  const teaches = (s) => found.some((other) => other.u === s.u && other.a !== s.a);
  const opened = (el("filter").value === "all" && found.find(teaches)) || found[0]; // a group from which something is learned
  if (opened && !el("sample").innerHTML) {
    openSample(samples.indexOf(opened));
    el("sample-list").scrollTop = el("sample-list").querySelector("tr.open").offsetTop - 60;
  }
}

function shade(value, scale, two) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "";
  const strength = Math.min(1, Math.abs(value) / (scale || 1)) * 0.75;
  return `background:rgba(var(${two && value < 0 ? "--cool" : "--heat"}),${strength.toFixed(3)})`;
}

function tokensOf(sample, by) {
  const { errors, weights } = tokenValues(sample);
  const turns = sample.t.filter(([, , generated]) => generated);
  const credit = turns.flatMap(([, count], k) => Array(count).fill(sample.c ? sample.c[k] : 0));
  const value = {
    mismatch: (i) => errors[i], weight: (i) => (weights[i] === null ? null : weights[i] - 1),
    surprise: (i) => (sample.p || sample.e)[i], advantage: (i) => sample.a + credit[i], age: (i) => (sample.age ? sample.age[i] : 0), none: () => null,
    teacher: (i) => (sample.q && sample.p ? sample.q[i] - sample.p[i] : null),
  }[by];
  const all = (sample.e || sample.p || []).map((_, i) => Math.abs(value(i) ?? 0));
  const least = { mismatch: 0.02, weight: 0.02, surprise: 2, advantage: 1, age: 1, none: 1, teacher: 1 }[by];
  const scale = Math.max(least, ...all.slice(0, 5000));
  let at = 0, i = 0, html = "";
  for (const [role, count, generated] of sample.t) {
    if (!generated) { html += `<span class="said" title="${escaped(role)}">${saidOf(sample, at, at + count)}</span>`; at += count; continue; }
    for (let k = 0; k < count; k++, i++, at++) {
      const policy = sample.p ? `${data.state.algorithm === "rm" ? "score" : "policy"} ${sample.p[i]}\nweight ${short(weights[i])}` : "not trained on";
      const words = `${JSON.stringify(data.tokens[sample.ids[at]] ?? sample.ids[at])}  id ${sample.ids[at]}\n${sample.e ? `engine ${sample.e[i]}\n` : ""}${policy}\n${sample.q ? `teacher ${sample.q[i]}\n` : ""}age ${sample.age ? sample.age[i] : 0}${sample.c ? `\ncredit of the turn ${credit[i]}` : ""}`;
      html += `<s style="${shade(value(i), scale, by === "weight" || by === "advantage" || by === "teacher")}" data-tip="${escaped(words)}">${escaped(data.tokens[sample.ids[at]] ?? `[${sample.ids[at]}]`)}</s>`;
    }
  }
  return html || escaped(sample.text || "(no tokens)");
}

function promptOf(sample) {
  let end = 0;
  for (const [, count, generated] of sample.t) { if (generated) break; end += count; }
  return [...sample.ids.slice(0, end), ...(sample.im || []).filter(([first]) => first < end).map(([, , digest]) => digest)].join(" ");
}

async function showOverTime() {
  const kind = el("kind").value, chosen = loaded[kind + el("sample-step").value][openIndex], rows = [];
  const packed = data.samples[kind] || {};
  for (const step of data.shards[kind]) {
    if (!loaded[kind + step] && packed[step]) await keep(kind, step, packed[step]);
    const group = (loaded[kind + step] || []).filter((s) => promptOf(s) === promptOf(chosen));
    if (group.length) rows.push([step, group]);
  }
  const head = "<tr><th>step</th><th>mean reward</th><th style='text-align:left'>rewards</th><th style='text-align:left'>an answer</th></tr>";
  el("over-time").innerHTML = `<table><thead>${head}</thead><tbody>` + rows.map(([step, group]) => {
    const rewards = group.map((s) => s.r).filter((r) => r !== null);
    return `<tr data-step="${step}"><td>${step}</td><td>${rewards.length ? short(rewards.reduce((a, b) => a + b, 0) / rewards.length) : "none"}</td><td class="text">${group.map((s) => rewardOf(s)).join(", ")}</td><td class="text">${escaped(answerOf(group[0]).slice(0, 100))}</td></tr>`;
  }).join("") + "</tbody></table><p class='hint'>Of the steps that are in this page, or were opened in it, those that have this prompt.</p>";
}

let openIndex = 0;
function openSample(index) {
  openIndex = index;
  const samples = loaded[el("kind").value + el("sample-step").value], chosen = samples[index], by = el("colour").value;
  document.querySelectorAll("#sample-list tr").forEach((row) => row.classList.toggle("open", +row.dataset.index === index));
  const group = samples.filter((s) => s.u === chosen.u).sort((a, b) => (a === chosen ? -1 : b === chosen ? 1 : a.g - b.g));
  el("sample").innerHTML = `<h3>Prompt ${escaped(chosen.u)}: its ${group.length} sample${group.length > 1 ? "s" : ""}${chosen.truth === null ? "" : `, expected ${escaped(chosen.truth)}`} <button id="show-over-time">over time</button></h3><div id="over-time"></div><div class="group">` +
    group.map((s) => {
      const named = Object.entries(s.R).map(([name, value]) => `${escaped(name)} ${short(value)}`).join(", ");
      return `<div class="card ${s === chosen ? "open" : ""}"><div class="facts">#${s.g} · ${data.state.rewarded ? `reward <b class="${s.r > 0 ? "good" : "bad"}">${s.r === null ? "none" : short(s.r)}</b>${named ? ` (${named})` : ""} · advantage ${s.A ? `<b class="advantage">${s.a}</b> = <span class="formula">${escaped(s.A)}</span>, ${s.n} rewards in its group${s.kl ? `, less ${short(s.kl)} times the KL from each token on` : ""}` : `<b>${short(s.a)}</b>`}${s.c ? `, plus by turn ${s.c.map(short).join(", ")}` : ""} · ` : ""}${(s.e || s.p || []).length} tokens${s.cut ? " · cut off" : ""}${s.left ? ` · left out: ${escaped(s.left)}` : ""}${s.w === 0 ? " · masked" : ""}${data.state.rewarded ? `<br>answer ${s.ans === null ? "none found" : `<b>${escaped(s.ans)}</b>`} · ${escaped(s.why || "")} · scored in ${short(s.s)} s` : ""}${Object.keys(s.row || {}).length ? `<br><span class="hint">${escaped(Object.entries(s.row).map(([name, value]) => `${name} ${value}`).join(" · "))}</span>` : ""}</div><div class="tokens">${tokensOf(s, by)}</div></div>`;
    }).join("") + "</div>";
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  if (data) drawCharts();
}

async function start() {
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  data = await unpack(el("data").textContent);
  showHead();
  showStandings();
  el("metric-names").innerHTML = Object.keys(data.runs[0].curves).map((name) => `<option value="${escaped(name)}">`).join("");
  drawCharts();
  showLedger();
  const steps = Object.keys(data.timelines).map(Number);
  el("timeline-step").innerHTML = steps.map((step) => `<option value="${step}">step ${step}</option>`).join("");
  el("timeline-step").value = steps.includes(data.state.steps) ? data.state.steps : steps.at(-1);
  showTimeline();
  if (!data.state.rewarded) el("colour").value = "surprise"; // examples have one log-prob a token, the policy's
  if (data.state.algorithm === "rm") el("colour").selectedOptions[0].textContent = "score of the reward model";
  fillSteps();
  el("theme").onclick = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  el("smooth").oninput = () => charts.filter((chart) => !chart.sparse).forEach(({ plot, columns }) => plot.setData(columns(+el("smooth").value)));
  el("metric-search").oninput = drawCharts;
  el("flat").ontoggle = drawCharts;
  el("timeline-step").onchange = showTimeline;
  el("step-back").onclick = () => moveStep(-1);
  el("step-on").onclick = () => moveStep(1);
  el("ledger").onclick = (event) => {
    const chosen = event.target.closest("[data-step]");
    if (chosen) { el("timeline-step").value = chosen.dataset.step; showTimeline(); }
  };
  el("kind").onchange = fillSteps;
  el("sample-step").onchange = chooseStep;
  el("search").oninput = showSamples;
  el("filter").onchange = () => { el("sample").innerHTML = ""; showSamples(); };
  el("colour").onchange = () => openSample(openIndex);
  el("sample-list").onclick = (event) => {
    const row = event.target.closest("tr[data-index]");
    if (row) openSample(+row.dataset.index);
  };
  el("sample").onclick = async (event) => {
    if (event.target.id === "show-over-time") return showOverTime();
    const row = event.target.closest("tr[data-step]");
    if (row) { el("sample-step").value = row.dataset.step; await chooseStep(); el("sample").scrollIntoView(); }
  };
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawCharts(); showTimeline(); } });
  document.body.dataset.ready = "yes";
}
start();

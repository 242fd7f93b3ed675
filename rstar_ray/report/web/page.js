// ---- the page: its sections from the run's data, rebuilt when an active run has new data

let titles = {};
const stageTitle = stage => titles[stage] || stage;
const page = document.getElementById("page"), bar = document.getElementById("bar");
let browser = null;

function tiles(data) {
  return node("div", { class: "tiles" }, data.tiles.map(tile => node("div", { class: "tile", style: `--accent:var(--${tile.colour})` }, node("div", { class: "name" }, tile.name), node("div", { class: "value" }, tile.value), node("div", { class: "note" }, tile.note))));
}

function learning(data) {
  const percentTick = value => +(100 * value).toFixed(1) + " %", grid = node("div", { class: "charts" });
  if (data.heldout.length) grid.append(pointChart(data, { title: data.heldout_title, colour: "green", top: 1, tick: percentTick }));
  for (const line of data.lines) grid.append(lineChart(data, { ...line, tick: line.unit === "percent" ? percentTick : value => +value.toFixed(2), show: show[line.unit] }));
  return section("learning", "Learning", grid);
}

const STATES = { ok: "✓", warn: "!", bad: "✕", unknown: "?" };

// One row per health check: its state, the current value, the threshold and the threshold's source.
function healthSection(data) {
  const rows = data.health.rows.map(row => [node("span", { class: `state ${row.state}` }, STATES[row.state]), row.signal, node("span", {}, row.current, row.rl_step && row.state !== "ok" ? [" ", node("a", { href: "#time", onclick: () => pickStep(row.rl_step) }, where(data, row.rl_step))] : ""), row.threshold, row.source]);
  return section("health", "Health checks", node("p", { class: "note" }, `${data.health.summary}. Over the last ${data.health.window} steps.`), table(["", "signal", "current", "threshold", "source"], rows, "checks"));
}

let pickStep = () => {};

function time(data) {
  const layers = data.phases.map(phase => ({ ...phase, label: `${phase.name} ${(100 * phase.share).toFixed(0)} %` })), one = node("div", { class: "card wide why-slow" });
  pickStep = step => {
    const i = data.x.indexOf(step);
    if (i >= 0) one.replaceChildren(...slowStep(data, i));
  };
  const slowest = node("div", { class: "slowest spaced" }, node("span", { class: "label" }, "Slowest"), data.slow.slowest.map(step => node("button", { class: "plain", onclick: () => pickStep(step) }, where(data, step))));
  const shared = node("p", { class: "note spaced" }, `Generation, tools and verification overlap: they share out the rollout phase by the rollouts' own seconds. The parts add up to ${(100 * data.slow.covered).toFixed(1)} % of the time of all steps (${(100 * data.slow.worst_covered).toFixed(1)} % in the worst step); the rest is shown as other.`);
  pickStep(data.slow.slowest[0]);
  return section("time", "Step time", layerChart(data, { title: `${data.time_title}; click a step for an explanation`, top: data.time_top, tick: value => +value.toFixed(2) + " s", layers, unit: value => value.toFixed(1), pick: step => pickStep(step) }), slowest, one, shared);
}

const more = seconds => Math.abs(seconds) < 0.005 ? "" : (seconds > 0 ? "+" : "−") + show.seconds(Math.abs(seconds));

function slowStep(data, i) {
  const { slow } = data, stage = data.spans.find(span => data.x[i] > span.start && data.x[i] <= span.end), usual = slow.medians[stage.name], longest = slow.longest[i];
  const whole = data.phases.reduce((sum, phase) => sum + phase.values[i], 0);
  const rows = data.phases.map(phase => [node("span", {}, node("i", { class: "swatch", style: `background:var(--${phase.colour})` }), phase.name), show.seconds(phase.values[i]), `${(100 * phase.values[i] / whole).toFixed(1)} %`, usual[phase.phase] === undefined ? "–" : show.seconds(usual[phase.phase]), usual[phase.phase] === undefined ? "" : more(phase.values[i] - usual[phase.phase])]);
  rows.push(["the step", show.seconds(whole), "100 %", show.seconds(usual.step_s), ""]);
  const turns = longest ? longest.turn_s.map(([generate_s, tool_s]) => ({ generate_s, tool_s })) : [];
  return [
    node("div", { class: "head" }, where(data, data.x[i])), node("p", {}, slow.because[i]),
    longest ? node("div", { class: "longest" }, node("span", { class: "label" }, "Its longest rollout, ", node("code", {}, longest.rollout_id), ": ", readLink(longest.rollout_id)), timeline(turns, longest.verify_s, longest.placements)) : "",
    table(["part", "seconds", "share", "stage's median", "difference"], rows, "plain result"),
  ];
}

// To a rollout's text, where it is recorded.
function readLink(id) {
  const [stage, step, ...rest] = id.split("/");
  const row = browser ? browser.store.rowOf(`${stage}-step-${step.padStart(6, "0")}.jsonl:${rest.join("/")}`) : -1;
  return row < 0 ? node("span", {}, "not recorded") : node("a", { href: "#trajectories", onclick: () => browser.go(row) }, "read it");
}

const STATUS_COLOURS = { trained: "green", resampled_away: "grey", in_equal_groups: "blue", left_out: "amber", dropped: "red" };

// Every count links to its rollouts: the link sets the browser's filter.
function ledgerSection(data) {
  const { ledger } = data, at = ledger.statuses.map((_, i) => 4 + i);
  const stages = [...new Set(ledger.steps.map(row => row[0]))];
  const link = (count, wanted) => count ? node("a", { href: `#trajectories?${new URLSearchParams(wanted)}` }, show.count(count)) : "0";
  const sum = (rows, i) => rows.reduce((total, row) => total + row[i], 0);
  const head = ["stage", "rollouts", ...ledger.statuses.map(status => STATUS_WORDS[status])];
  const rows = stages.map(stage => {
    const of = ledger.steps.filter(row => row[0] === stage);
    return [stageTitle(stage), link(sum(of, 3), { stage }), ...at.map((i, f) => link(sum(of, i), { stage, status: ledger.statuses[f] }))];
  });
  const one = node("div", {});
  const pick = rl_step => {
    const row = ledger.steps.find(candidate => candidate[2] === rl_step);
    if (!row) return;
    const [stage, step] = row;
    one.replaceChildren(table([`${stageTitle(stage)}, step ${step}`, ...head.slice(1)], [["rollouts", link(row[3], { stage, step }), ...at.map((i, f) => link(row[i], { stage, step, status: ledger.statuses[f] }))]], "spaced"));
  };
  const of = new Map(ledger.steps.map(row => [row[2], row]));
  const layers = ledger.statuses.map((status, f) => ({ name: STATUS_WORDS[status], colour: STATUS_COLOURS[status] || "purple", values: data.x.map(step => of.has(step) ? of.get(step)[4 + f] : 0) }));
  const most = Math.max(1, ...ledger.steps.map(row => row[3]));
  pick(ledger.steps[ledger.steps.length - 1][2]);
  return section("ledger", "Rollouts by status", table(head, rows), layerChart(data, { title: "Rollouts by step; click a step for its counts", top: most, tick: value => show.count(Math.round(value)), layers, unit: value => show.count(value), pick }), one,
    node("p", { class: "note spaced" }, "Click a count to list its rollouts: with their texts if the step was recorded, otherwise by id."));
}

function trajectories(data, source) {
  if (browser) browser.renew(data.browser, data.ledger);
  else browser = new Browser(new Store(data.browser, data.ledger, source));
  return section("trajectories", "Trajectories", node("p", { class: "note" }, data.browser.note), key(), browser.element);
}

function key() {
  const one = (kind, text) => node("span", {}, node("i", { class: `mark ${kind}` }), text);
  return node("div", { class: "key" }, one("right", "right"), one("part", "in between"), one("wrong", "wrong"), one("right away", "hollow: resampled away"), one("wrong erred", "ringed: a tool call failed"));
}

function sections(data, source) {
  const made = [];
  const recorded = data.browser.columns.group.length || data.ledger.steps.length ? trajectories(data, source) : null;
  if (data.health.rows.length) made.push(healthSection(data));
  if (data.x.length) made.push(learning(data), time(data));
  if (recorded) made.push(recorded);
  if (data.ledger.steps.length) made.push(ledgerSection(data));
  if (data.results.length) made.push(section("results", "Evaluations", data.results.map(result => [node("h3", {}, result.title), table(result.head, result.rows, "result")]).flat(), data.families.length ? familyChart(data.families) : ""));
  if (data.metrics_rows.length) made.push(section("metrics", "All metrics", node("p", { class: "note" }, "Over all steps of a stage."), table(data.metrics_head, data.metrics_rows, "metrics")));
  if (data.sft && data.sft.training.length) made.push(section("sft", "Supervised fine-tuning", sftChart(data.sft)));
  if (data.facts.length) made.push(section("facts", "Facts", table(null, data.facts, "facts")));
  return made;
}

const SHORT = { health: "Health", learning: "Learning", time: "Time", trajectories: "Trajectories", ledger: "Ledger", results: "Evaluations", metrics: "Metrics", sft: "SFT", facts: "Facts" };

function render(data, source) {
  titles = data.stage_titles;
  charts.length = 0;
  const looked = browser ? [scrollY, browser.items.scrollTop, browser.detail.scrollTop] : null;
  const made = sections(data, source);
  page.replaceChildren(node("h1", {}, data.name), node("p", { class: "lead" }, data.headline.replaceAll(" %", "\u00a0%")), data.faults.map(fault => node("p", { class: "note fault" }, fault)), tiles(data), ...made, node("footer", {}, data.footer));
  bar.replaceChildren(node("a", { class: "name", href: "#" }, data.name), node("nav", { "aria-label": "sections" }, made.filter(part => SHORT[part.id]).map(part => node("a", { href: `#${part.id}` }, SHORT[part.id]))), node("span", { id: "state" }),
    node("button", { class: "plain", title: "light or dark", onclick: turnLights, "aria-label": "light or dark" }, "◐"));
  if (looked) {
    scrollTo(0, looked[0]);
    browser.items.scrollTop = looked[1];
    browser.detail.scrollTop = looked[2];
  }
}

function turnLights() {
  const root = document.documentElement.dataset, now = root.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.theme = now === "dark" ? "light" : "dark";
}

function follow() {
  if (!location.hash.startsWith("#trajectories") || !browser) return;
  if (location.hash.includes("?")) browser.recall(location.hash);
  document.getElementById("trajectories").scrollIntoView();
}

async function start() {
  const text = document.getElementById("data").textContent.trim();
  if (text) {
    render(JSON.parse(text), new EmbeddedSource());
  } else if (!await startWatching()) return;
  if (browser) await browser.recall(location.hash);
  addEventListener("hashchange", follow);
  if (location.hash.startsWith("#trajectories")) follow();
  document.documentElement.dataset.ready = "true";
}

start();

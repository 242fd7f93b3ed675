// ---- what is recorded: rows by column, texts in compressed blocks that are opened when they are asked for

// A block of the page itself, or a body that the watching server sends.
class EmbeddedSource {
  has(name) { return document.getElementById(name) !== null; }
  async read(name) {
    if (!this.has(name) && document.readyState === "loading")
      await new Promise(done => document.addEventListener("DOMContentLoaded", done, { once: true }));
    const block = document.getElementById(name);
    return block ? inflated(Uint8Array.from(atob(block.textContent), letter => letter.charCodeAt(0))) : null;
  }
}

class ServedSource {
  constructor(fetchBytes) { this.fetchBytes = fetchBytes; }
  has() { return true; }
  async read(name) {
    const bytes = await this.fetchBytes(`/block/${name.split("/").map(encodeURIComponent).join("/")}`);
    return bytes ? inflated(bytes) : null;
  }
}

async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// Of a rollout in the ledger: `<position>-<problem id>/<sibling>`, behind `<stage>/<step>/` if it was abandoned.
function problemId(id) {
  const parts = /^(?:[^/]+\/\d+\/)?\d+-(.*)\/\d+$/s.exec(id.replace(/\/again-\d+$/, ""));
  return parts ? parts[1] : "";
}

const NO_FILTER = { q: "", file: "", stage: "", step: "", verdict: "", status: "", stop: "", tool: "", min: "", max: "", sort: "", problem: "" };

class Store {
  constructor(data, ledger, source) {
    this.source = source;
    this.take(data, ledger);
  }

  take(data, ledger) {
    const said = new Map([...(this.texts || [])].map(([row, text]) => [this.key(row), text]));
    this.opened = new Map();
    this.texts = new Map(); // lower case, by row, for the search
    this.reading = null;
    Object.assign(this, { files: data.files, groups: data.groups, problems: data.problems, stops: data.stops, outcomes: data.outcomes, statuses: data.statuses, ledger });
    this.c = data.columns;
    this.length = this.c.group.length;
    this.bodies = new Set(data.bodies);
    this.figures = new Set(data.figures);
    this.haystack = this.problems.map(problem => `${problem[0]} ${problem[1]} ${problem[2]} ${problem[3]}`.toLowerCase());
    this.ofGroup = this.groups.map(() => []);
    this.ofProblem = this.problems.map(() => []);
    for (let row = 0; row < this.length; row++) {
      this.ofGroup[this.c.group[row]].push(row);
      this.ofProblem[this.groups[this.c.group[row]][2]].push(row);
    }
    for (let row = 0; row < this.length && said.size; row++) if (said.has(this.key(row))) this.texts.set(row, said.get(this.key(row)));
    this.recorded = new Set(this.files.filter(file => !file.set).map(file => `${file.stage}-${file.step}`));
    this.lost = ledger.lost.map(([stage, step, id, status, reason]) => ({ stage, step, id, status, reason }))
      .filter(item => item.status === "dropped" || !this.recorded.has(`${item.stage}-${item.step}`));
  }

  file(row) { return this.files[this.groups[this.c.group[row]][1]]; }
  problem(row) { return this.problems[this.groups[this.c.group[row]][2]]; }
  // The trained problem with the id of a rollout that only the ledger names; -1: none was recorded.
  problemOf(id) {
    const wanted = problemId(id), group = this.groups.find(group => !this.files[group[1]].set && this.problems[group[2]][0] === wanted);
    return group ? group[2] : -1;
  }
  status(row) { return this.statuses[this.c.status[row]]; }
  id(row) { return `${this.groups[this.c.group[row]][0]}/${this.c.sibling[row]}`; }
  key(row) { return `${this.file(row).name}:${this.id(row)}`; }
  rowOf(key) {
    for (let row = 0; row < this.length; row++) if (this.key(row) === key) return row;
    return -1;
  }
  block(kind, group) { return `${kind}/${this.files[this.groups[group][1]].name}/${this.groups[group][3]}`; }
  right(row) { return this.c.reward[row] >= 1; }

  // Rows that fit, and what only the ledger knows: a number, or an object of `lost` or of a step's ids.
  filter(wanted, ids = null) {
    const { c } = this, found = [];
    const terms = wanted.q.toLowerCase().split(/\s+/).filter(Boolean);
    const status = wanted.status === "" ? -1 : this.statuses.indexOf(wanted.status), stop = wanted.stop === "" ? -1 : this.stops.indexOf(wanted.stop);
    const bit = this.outcomes.indexOf(wanted.tool), least = wanted.min === "" ? -1 : +wanted.min, most = wanted.max === "" ? Infinity : +wanted.max;
    const fileFits = this.files.map(file => (wanted.file === "" || file.name === wanted.file) && (wanted.stage === "" || file.stage === wanted.stage)
      && (wanted.step === "" || (String(file.step) === wanted.step && !file.set)) && (wanted.status === "" || !file.set));
    const groupFits = this.groups.map(group => fileFits[group[1]] && (wanted.problem === "" || this.problems[group[2]][0] === wanted.problem));
    const missing = this.problems.map((_, problem) => terms.filter(term => !this.haystack[problem].includes(term)));
    for (let row = 0; row < this.length; row++) {
      const group = c.group[row];
      if (!groupFits[group]) continue;
      if (wanted.verdict === "right" ? c.reward[row] < 1 : wanted.verdict === "wrong" ? c.reward[row] > 0 : wanted.verdict === "part" ? c.reward[row] <= 0 || c.reward[row] >= 1 : false) continue;
      if (status >= 0 && c.status[row] !== status) continue;
      if (stop >= 0 && c.stop[row] !== stop) continue;
      if (c.tokens[row] < least || c.tokens[row] > most) continue;
      if (wanted.tool !== "") {
        if (bit >= 0 ? !(c.outcomes[row] >> bit & 1) : wanted.tool === "failed" ? !c.failed[row] : wanted.tool === "none" ? c.calls[row] : wanted.tool === "clean" ? !c.calls[row] || c.failed[row] : wanted.tool === "recovered" ? !c.recovered[row] : false) continue;
      }
      const open = missing[this.groups[group][2]];
      if (open.length) {
        const name = this.groups[group][0].toLowerCase();
        const text = this.texts.get(row);
        if (!open.every(term => name.includes(term) || (text !== undefined && text.includes(term)))) continue;
      }
      found.push(row);
    }
    this.sort(found, wanted.sort);
    return found.concat(this.unrecorded(wanted, terms, ids));
  }

  sort(found, by) {
    const { c } = this, orders = {
      longest: (a, b) => c.tokens[b] - c.tokens[a], shortest: (a, b) => c.tokens[a] - c.tokens[b],
      slowest: (a, b) => c.generate_s[b] + c.tool_s[b] - c.generate_s[a] - c.tool_s[a],
      failed: (a, b) => c.failed[b] - c.failed[a], worst: (a, b) => c.reward[a] - c.reward[b],
      advantage: (a, b) => (c.advantage[b] ?? -Infinity) - (c.advantage[a] ?? -Infinity),
      newest: (a, b) => c.group[b] - c.group[a] || c.sibling[a] - c.sibling[b],
    };
    if (orders[by]) found.sort(orders[by]);
  }

  // What has no text: a step's rollouts as the ledger names them, or those that were lost.
  unrecorded(wanted, terms, ids) {
    if (["file", "verdict", "stop", "tool", "min", "max"].some(name => wanted[name] !== "")) return [];
    const listed = ids || (wanted.status === "dropped" || wanted.status === "left_out" ? this.lost : []);
    return listed.filter(item => (wanted.status === "" || item.status === wanted.status) && (wanted.stage === "" || item.stage === wanted.stage)
      && (wanted.step === "" || String(item.step) === wanted.step) && (wanted.problem === "" || problemId(item.id) === wanted.problem)
      && terms.every(term => item.id.toLowerCase().includes(term) || item.reason.toLowerCase().includes(term)));
  }

  // The rollouts of a step that was not recorded, as the ledger has them; null where the page does not hold them.
  async stepIds(stage, step) {
    const name = `ids/${stage}/${step}`;
    if (this.recorded.has(`${stage}-${step}`)) return null;
    const groups = await this.open(name);
    if (!groups) return null;
    const reasons = new Map(this.ledger.lost.filter(item => item[0] === stage && item[1] === step).map(item => [item[2], item[4]]));
    return Object.entries(groups).flatMap(([group, siblings]) => Object.entries(siblings).map(([sibling, status]) =>
      ({ stage, step, id: `${group}/${sibling}`, status: this.ledger.statuses[status], reason: reasons.get(`${group}/${sibling}`) || "" })));
  }

  open(name) {
    if (!this.opened.has(name)) {
      if (this.opened.size > 400) this.opened.clear();
      this.opened.set(name, this.source.read(name).catch(() => null));
    }
    return this.opened.get(name);
  }
  async body(row) {
    const group = this.c.group[row];
    if (!this.bodies.has(group)) return null;
    const texts = await this.open(this.block("texts", group));
    if (!texts) return null;
    const body = texts[this.ofGroup[group].indexOf(row)];
    return { ...body, prompt: body.prompt || texts[0].prompt };
  }
  async tokenFigures(row) {
    const group = this.c.group[row];
    if (!this.figures.has(group)) return null;
    const figures = await this.open(this.block("figures", group));
    return figures ? figures[this.ofGroup[group].indexOf(row)] : null;
  }

  // Reads every text once, for the search, and reports the progress; concurrent calls share one reading.
  readAll(tell) { return this.reading ||= this.readTexts(tell); }
  async readTexts(tell) {
    const { texts: held, bodies } = this;
    let done = 0;
    for (const group of bodies) {
      const known = this.ofGroup[group].every(row => held.has(row));
      const texts = known ? null : await this.source.read(this.block("texts", group)).catch(() => null);
      if (this.texts !== held) return; // new data arrived; it is read by a new call
      if (texts) this.ofGroup[group].forEach((row, i) => held.set(row, texts[i].turns.flatMap(turn => [turn.completion, ...turn.results.map(result => result[0])]).join("\n").toLowerCase()));
      if (++done % 20 === 0 || done === bodies.size) tell(done, bodies.size);
    }
  }
}

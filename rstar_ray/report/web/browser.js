// ---- the trajectory browser: filters, a list of which only what is seen is made, and one trajectory at a time

const ROW_PX = 58, BEYOND = 6;
const STATUS_WORDS = { trained: "trained on", resampled_away: "resampled away", in_equal_groups: "in equal groups", left_out: "left out", dropped: "dropped", abandoned: "abandoned" };

class Browser {
  constructor(store) {
    this.store = store;
    this.wanted = { ...NO_FILTER };
    this.shown = [];
    this.selected = -1;
    this.look = "";
    this.beside = false;
    this.items = node("div", { class: "items", role: "listbox", tabindex: "0", "aria-label": "trajectories", onscroll: () => this.draw(), onkeydown: event => this.key(event) });
    this.space = node("div", { class: "space" });
    this.items.append(this.space);
    this.count = node("div", { class: "count", role: "status" });
    this.detail = node("div", { class: "detail", tabindex: "-1" });
    this.filters = node("div", { class: "filters" });
    this.element = node("div", { class: "viewer" }, node("div", { class: "list" }, this.filters, this.items, this.count), this.detail);
    this.makeFilters();
    new ResizeObserver(() => this.draw()).observe(this.items);
  }

  makeFilters() {
    const { store } = this, fields = this.fields = {};
    const choose = (name, label, options) => fields[name] = node("select", { "aria-label": label, title: label, onchange: event => this.set({ [name]: event.target.value }) }, options.map(([value, text]) => node("option", { value }, text)));
    const type = (name, label, attributes) => fields[name] = node("input", { "aria-label": label, title: label, oninput: event => this.soon({ [name]: event.target.value.trim() }), ...attributes });
    const stages = [...new Set(store.files.map(file => file.stage))];
    const search = type("q", "search", { type: "search", placeholder: "Search problems, ids, and what was said", onfocus: () => this.readAll() });
    this.filters.replaceChildren(
      search,
      choose("file", "recorded at", [["", "everything recorded"], ...store.files.map(file => [file.name, file.title])]),
      choose("stage", "stage", [["", "all stages"], ...stages.map(stage => [stage, stageTitle(stage)])]),
      choose("verdict", "reward", [["", "any reward"], ["right", "right"], ["wrong", "wrong"], ["part", "in between"]]),
      choose("status", "status", [["", "any status"], ...store.statuses.slice(1).map(status => [status, STATUS_WORDS[status] || words(status)])]),
      choose("tool", "tool", [["", "any use of tools"], ["clean", "calls, none failed"], ["failed", "a call failed"], ["recovered", "recovered from a failure"], ["none", "no call"], ...store.outcomes.filter(outcome => outcome !== "ok").map(outcome => [outcome, `a call: ${words(outcome)}`])]),
      choose("stop", "how it ended", [["", "any end"], ...store.stops.map(stop => [stop, words(stop)])]),
      choose("sort", "order", [["", "as recorded"], ["newest", "newest first"], ["longest", "longest"], ["shortest", "shortest"], ["slowest", "slowest"], ["failed", "most failed calls"], ["worst", "lowest reward"], ["advantage", "highest advantage"]]),
      type("step", "step of the stage", { inputmode: "numeric", placeholder: "any step" }),
      type("min", "tokens, at least", { inputmode: "numeric", placeholder: "tokens, at least" }),
      type("max", "tokens, at most", { inputmode: "numeric", placeholder: "tokens, at most" }),
      this.chips = node("div", { class: "chips" }),
    );
    this.showFields();
  }

  // New figures of the same run: what is looked at stays.
  renew(data, ledger) {
    const key = this.keyNow(), search = this.fields.q.value;
    this.store.take(data, ledger);
    this.makeFilters();
    this.fields.q.value = search;
    this.refresh(key);
  }

  showFields() {
    for (const [name, field] of Object.entries(this.fields)) if (field.value !== this.wanted[name] && document.activeElement !== field) field.value = this.wanted[name];
    const set = Object.entries(this.wanted).filter(([name, value]) => value !== "" && name !== "sort");
    this.chips.replaceChildren(...set.map(([name, value]) => node("button", { class: "chip", title: "take this filter away", onclick: () => { if (this.fields[name]) this.fields[name].value = ""; this.set({ [name]: "" }); } }, `${name === "q" ? "“" + value + "”" : name === "file" ? this.fileTitle(value) : name === "min" ? "≥ " + value : name === "max" ? "≤ " + value : name === "step" ? "step " + value : name === "status" ? STATUS_WORDS[value] || value : words(value)} ×`)),
      set.length > 1 ? node("button", { class: "chip all", onclick: () => this.set({ ...NO_FILTER }, true) }, "all") : "");
  }
  fileTitle(name) { return (this.store.files.find(file => file.name === name) || { title: name }).title; }

  soon(change) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.set(change), 60);
  }
  async set(change, whole = false) {
    this.wanted = whole ? { ...NO_FILTER, ...change } : { ...this.wanted, ...change };
    await this.refresh();
    this.remember();
  }

  async refresh(keep = null) {
    const { store, wanted } = this, turn = this.turn = (this.turn || 0) + 1;
    const ids = wanted.stage && wanted.step ? await store.stepIds(wanted.stage, +wanted.step) : null;
    if (turn !== this.turn) return;
    if (wanted.q) this.readAll(); // for a filter from the address, and after a step's new data
    const started = performance.now();
    this.shown = store.filter(wanted, ids);
    this.filterMs = performance.now() - started;
    this.space.style.height = `${this.shown.length * ROW_PX}px`;
    this.showFields();
    this.tell();
    const kept = keep === null ? -1 : this.shown.findIndex(item => typeof item === "number" && store.key(item) === keep);
    if (keep === null || kept < 0) this.items.scrollTop = 0;
    this.drawn = null;
    if (kept >= 0) { this.selected = kept; this.draw(); }
    else if (this.shown.length) this.select(0, false);
    else { this.selected = -1; this.draw(); this.detail.replaceChildren(this.nothing()); }
  }

  tell() {
    const { store } = this, recorded = this.shown.filter(item => typeof item === "number").length, named = this.shown.length - recorded;
    const searched = this.wanted.q && store.texts.size < store.length ? ` · texts of ${show.count(store.texts.size)} searched` : "";
    this.count.textContent = `${show.count(recorded)} of ${show.count(store.length)} recorded${named ? `, and ${show.count(named)} that the ledger names` : ""}${searched}`;
  }

  nothing() {
    const { wanted, store } = this;
    const step = wanted.stage && wanted.step && !store.recorded.has(`${wanted.stage}-${wanted.step}`);
    return node("p", { class: "empty" }, step ? "This step's trajectories were not recorded, and its rollouts are not named in this page: the ledger.jsonl of the run has them." : "Nothing that is recorded is like that.");
  }

  async readAll() {
    await this.store.readAll((done, all) => {
      this.tell();
      if (this.wanted.q && (done === all || done % 200 === 0)) this.refresh(this.keyNow());
    });
  }
  keyNow() { const item = this.shown[this.selected]; return typeof item === "number" ? this.store.key(item) : null; }

  draw() {
    const top = Math.max(0, Math.floor(this.items.scrollTop / ROW_PX) - BEYOND);
    const end = Math.min(this.shown.length, Math.ceil((this.items.scrollTop + this.items.clientHeight) / ROW_PX) + BEYOND);
    const now = `${top}-${end}-${this.selected}`;
    if (this.drawn === now) return;
    this.drawn = now;
    this.space.replaceChildren(...this.shown.slice(top, end).map((item, i) => this.row(item, top + i)));
  }

  row(item, i) {
    const { store } = this, attributes = { class: "row", role: "option", id: `row-${i}`, "aria-selected": String(i === this.selected), style: `top:${i * ROW_PX}px`, onclick: () => this.select(i) };
    if (typeof item !== "number") {
      return node("div", attributes, node("span", { class: "mark lost" }), node("span", { class: "q" }, item.id), node("span", { class: "m" }, `${stageTitle(item.stage)}, step ${item.step} · ${STATUS_WORDS[item.status]}`));
    }
    const { c } = store, status = store.status(item);
    const facts = [store.file(item).title, `${show.count(c.tokens[item])} tok`, c.calls[item] ? plural(c.calls[item], "call") + (c.failed[item] ? `, ${c.failed[item]} failed` : "") : "no call", status && status !== "trained" ? STATUS_WORDS[status] : ""];
    return node("div", attributes, mark(store, item), node("span", { class: "q" }, store.problem(item)[1]), node("span", { class: "m" }, facts.filter(Boolean).join(" · ")));
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: 8, PageUp: -8, Home: -1e9, End: 1e9 }[event.key];
    if (step === undefined || !this.shown.length) return;
    event.preventDefault();
    this.select(Math.max(0, Math.min(this.shown.length - 1, this.selected + step)));
  }

  select(i, asked = true) {
    this.selected = i;
    const top = i * ROW_PX;
    if (top < this.items.scrollTop) this.items.scrollTop = top;
    else if (top + ROW_PX > this.items.scrollTop + this.items.clientHeight) this.items.scrollTop = top + ROW_PX - this.items.clientHeight;
    this.draw();
    this.items.setAttribute("aria-activedescendant", `row-${i}`);
    this.open(this.shown[i]);
    if (asked) this.remember();
  }

  async open(item) {
    const turn = this.opening = (this.opening || 0) + 1;
    const made = typeof item === "number" ? await this.trajectory(item) : this.named(item);
    if (turn !== this.opening) return;
    this.detail.replaceChildren(...made);
    this.detail.scrollTop = 0;
  }
  go(row) {
    const at = this.shown.indexOf(row);
    if (at >= 0) return this.select(at);
    this.wanted = { ...NO_FILTER };
    return this.refresh(this.store.key(row)).then(() => this.select(this.shown.indexOf(row)));
  }

  named(item) {
    const of = this.store.problemOf(item.id);
    return [
      node("div", { class: "problem" }, of >= 0 ? this.store.problems[of][1] : item.id),
      node("div", { class: "meta" }, node("span", { class: `status ${item.status}` }, STATUS_WORDS[item.status]), node("span", {}, `${stageTitle(item.stage)}, step ${item.step}`), node("code", {}, item.id)),
      item.reason ? node("p", { class: "why" }, item.reason) : "",
      node("p", { class: "empty" }, item.status === "dropped" ? "It has no text: a failure of our own ended it, and it was neither scored nor trained on." : "Its text was not recorded: --checkpoint.trajectories-every-steps says how often a step's trajectories are."),
      of >= 0 && this.store.ofProblem[of].length ? this.sameProblem(of, -1) : "",
    ];
  }

  async trajectory(row) {
    const { store } = this, { c } = store, body = await store.body(row), file = store.file(row), problem = store.problem(row);
    const siblings = store.ofGroup[c.group[row]], status = store.status(row), number = store.groups[c.group[row]][2];
    const facts = [`truth ${problem[2]}`, file.title, plural(c.turns[row], "turn"), c.calls[row] ? `${plural(c.calls[row], "call")}, ${c.failed[row]} failed` : "no call", `${show.count(c.tokens[row])} tokens`, words(store.stops[c.stop[row]])];
    if (c.advantage[row] !== null) facts.push(`advantage ${c.advantage[row]}`);
    if (body && body.restarts) facts.push(`begun again ${plural(body.restarts, "time")}: a tool had lost its state`);
    if (body && body.judge_retries) facts.push(`judged again ${plural(body.judge_retries, "time")}`);
    const figures = body ? await store.tokenFigures(row) : null;
    if (this.look && !(figures && hasLook(figures, LOOKS[this.look]))) this.look = "";
    return [
      node("div", { class: "problem" }, problem[1]),
      node("div", { class: "meta" }, node("span", { class: store.right(row) ? "badge right" : "badge" }, `reward ${c.reward[row]}`), status ? node("span", { class: `status ${status}` }, STATUS_WORDS[status]) : "", facts.map(text => node("span", {}, text))),
      body && body.why ? node("p", { class: "why" }, body.why) : "",
      siblings.length > 1 ? this.strip(siblings, row) : "",
      this.beside ? await this.columns([row, ...siblings.filter(sibling => sibling !== row)]) : this.whole(row, body, figures),
      this.sameProblem(number, row),
      node("p", { class: "source" }, "In ", node("code", {}, `trajectories/${file.name}`), " as ", node("code", {}, body ? body.id : store.id(row))),
    ];
  }

  strip(siblings, row) {
    return node("div", { class: "siblings" }, node("span", { class: "label" }, `group of ${siblings.length}`),
      siblings.map(sibling => node("button", { class: sibling === row ? "sib here" : "sib", title: this.sentence(sibling), onclick: () => this.go(sibling) }, mark(this.store, sibling))),
      node("button", { class: "plain", "aria-pressed": String(this.beside), onclick: () => { this.beside = !this.beside; this.open(row); } }, this.beside ? "one at a time" : "side by side"));
  }
  sentence(row) {
    const { c } = this.store, status = this.store.status(row);
    return `reward ${c.reward[row]}, ${show.count(c.tokens[row])} tokens, ${plural(c.calls[row], "call")} of which ${c.failed[row]} failed${status ? ", " + STATUS_WORDS[status] : ""}`;
  }

  whole(row, body, figures) {
    if (!body) return node("p", { class: "empty" }, "This trajectory's text is not in this page, which holds whole groups of siblings up to its size: `python recipes/watch.py RUN` shows all of them.");
    const facts = { advantage: this.store.c.advantage[row] };
    const turns = node("div", { class: "turns" });
    const legend = node("span", { class: "label" });
    const fill = () => {
      legend.textContent = this.look ? LOOKS[this.look].legend : "";
      turns.replaceChildren(...body.turns.map((turn, i) => this.turnOf(body.turns, i, figures && figures[i] && figures[i][0] ? tokensOf(turn, figures[i]) : null, facts)));
    };
    const looks = figures ? node("div", { class: "looks", role: "radiogroup", "aria-label": "colour tokens by" }, node("span", { class: "label" }, "tokens by"), ["", ...Object.keys(LOOKS).filter(name => hasLook(figures, LOOKS[name]))].map(name => node("button", { class: "plain", role: "radio", "aria-checked": String(this.look === name), onclick: event => {
      this.look = name;
      for (const button of event.target.parentElement.querySelectorAll("button")) button.setAttribute("aria-checked", String(button === event.target));
      fill();
    } }, name ? LOOKS[name].title : "nothing")), legend) : "";
    fill();
    const prompt = body.prompt ? node("details", { class: "turn" }, node("summary", {}, "The prompt as the policy was given it"), node("div", { class: "seg prompt" }, node("pre", {}, body.prompt))) : "";
    return node("div", {}, timeline(body.turns, body.verify_s, body.placements), looks, prompt, turns);
  }

  turnOf(turns, i, tokens, facts) {
    const turn = turns[i], all = turns.length;
    const versions = [...new Set(turn.versions.map(run => run[0]))];
    const said = [`Turn ${i + 1} of ${all}`, `${show.count(turn.tokens)} tokens`, `${show.seconds(turn.generate_s)} generating`, turn.tool_s ? `${show.seconds(turn.tool_s)} in the tool` : "", versions.length ? `version ${versions.join(", then ")}` : ""];
    const line = lineOf(turns, i);
    if (turn.continues !== undefined) said.push(turn.continues < 0 ? "begins a line" : `continues turn ${turn.continues + 1}`, turn.why_new);
    return node("details", { class: "turn", open: true, style: line ? `margin-left: ${Math.min(line, 6) * 1.5}em` : "" }, node("summary", {}, said.filter(Boolean).join(" · ")), ...segmentsOf(turn, tokens, LOOKS[this.look], facts));
  }

  async columns(siblings) {
    const made = [];
    for (const sibling of siblings) {
      const body = await this.store.body(sibling);
      made.push(node("div", { class: "column" }, node("div", { class: "head" }, mark(this.store, sibling), node("button", { class: "plain", onclick: () => { this.beside = false; this.go(sibling); } }, this.sentence(sibling))),
        body ? body.turns.flatMap(turn => segmentsOf(turn, null, null, {})) : node("p", { class: "empty" }, "Its text is not in this page.")));
    }
    return node("div", { class: "columns" }, made);
  }

  sameProblem(number, row) {
    const { store } = this, byFile = new Map();
    for (const other of store.ofProblem[number]) {
      const file = store.groups[store.c.group[other]][1];
      byFile.set(file, [...(byFile.get(file) || []), other]);
    }
    if (byFile.size < 2 && row >= 0) return "";
    return node("div", { class: "same" }, node("h3", {}, "The same problem over the run"),
      node("table", {}, node("tbody", {}, [...byFile].sort((a, b) => a[0] - b[0]).map(([file, rows]) => node("tr", {}, node("td", {}, store.files[file].title), node("td", {}, `${rows.filter(other => store.right(other)).length} of ${rows.length} right`),
        node("td", { class: "marks" }, rows.slice(0, 64).map(other => node("button", { class: other === row ? "sib here" : "sib", title: this.sentence(other), onclick: () => this.go(other) }, mark(store, other)))))))),
      node("button", { class: "plain", onclick: () => this.set({ problem: store.problems[number][0] }, true) }, "list them"));
  }

  remember() {
    const parts = new URLSearchParams(Object.entries(this.wanted).filter(([, value]) => value !== ""));
    const item = this.shown[this.selected];
    if (typeof item === "number") parts.set("at", this.store.key(item));
    history.replaceState(null, "", `#trajectories?${parts}`);
  }
  async recall(hash) {
    const parts = Object.fromEntries(new URLSearchParams(hash.split("?")[1] || ""));
    const { at = null, ...wanted } = parts;
    this.wanted = { ...NO_FILTER, ...Object.fromEntries(Object.entries(wanted).filter(([name]) => name in NO_FILTER)) };
    await this.refresh(at);
    if (this.selected >= 0) this.select(this.selected, false);
    if (at === null || !this.wanted.q || this.keyNow() === at) return;
    await this.readAll(); // the search may find it by the text of its turns
    if (hash !== location.hash) return; // another filter or trajectory was selected meanwhile
    await this.refresh(at);
    if (this.selected >= 0) this.select(this.selected, false);
  }
}

function mark(store, row) {
  const reward = store.c.reward[row], status = store.status(row);
  return node("span", { class: `mark ${reward >= 1 ? "right" : reward > 0 ? "part" : "wrong"} ${status === "resampled_away" ? "away" : ""} ${store.c.failed[row] ? "erred" : ""}`, "aria-label": reward >= 1 ? "right" : reward > 0 ? "partly right" : "wrong" });
}

const hasLook = (figures, look) => !look.of || figures.some(turn => turn[look.of]);
const LABELS = { text: "policy", code: "tool call", stdin: "its input", "broken call": "a call that cannot be read", answer: "answer" };

// How many lines of tokens began before the one of turn i: an agent's conversations are a tree, which is indented by it.
function lineOf(turns, i) {
  const lines = [];
  for (let at = 0; at <= i; at++) lines.push(turns[at].continues === undefined ? (at ? lines[at - 1] : 0) : Math.max(...lines, -1) + 1);
  return lines[i];
}

function segmentsOf(turn, tokens, look, facts) {
  const made = turn.messages ? [segment("prompt", "the agent's messages", turn.messages)] : [];
  for (const [kind, start, end, innerStart, innerEnd, read] of turn.spans) {
    const whole = turn.completion.slice(start, end);
    if (tokens && look) {
      if (kind === "call") made.push(segment("code", LABELS.code, coloured(turn.completion, start, end, tokens, look, facts)));
      else if (kind === "text" && !whole.trim()) continue;
      else made.push(segment(kind, kind === "special" ? "" : LABELS[kind], coloured(turn.completion, start, end, tokens, look, facts)));
    } else if (kind === "call") {
      for (const [piece, text] of read) made.push(segment(piece, LABELS[piece], piece === "code" ? python(text) : text));
    } else if (kind !== "special" && whole.trim()) made.push(segment(kind, LABELS[kind], turn.completion.slice(innerStart, innerEnd).trim()));
  }
  for (const [text, outcome] of turn.results) made.push(segment(outcome === "ok" || outcome === "no result" ? "response" : "response failed", outcome === "ok" ? "tool" : `tool: ${words(outcome)}`, text));
  return made;
}

function segment(kind, label, content) {
  return node("div", { class: `seg ${kind}` }, label ? node("div", { class: "label" }, label) : "", node("pre", {}, content));
}

// Where a rollout's seconds went, turn by turn, with what it waited for a place, and under it why it was put there.
function timeline(turns, verify_s, placements) {
  const waits = i => placements.filter(placed => placed.turn === i).map(placed => ["wait", placed.waited_s, `${show.seconds(placed.waited_s)} waiting for ${placed.replica_id}`]);
  const parts = turns.flatMap((turn, i) => [...waits(i), ["generate", turn.generate_s, `turn ${i + 1}: ${show.seconds(turn.generate_s)} generating${turn.tokens ? ` ${turn.tokens} tokens` : ""}`], ["tool", turn.tool_s, `turn ${i + 1}: ${show.seconds(turn.tool_s)} in the tool`]]);
  if (verify_s) parts.push(["verify", verify_s, `${show.seconds(verify_s)} judging the answer`]);
  const all = parts.reduce((sum, part) => sum + part[1], 0);
  if (all <= 0) return "";
  const kinds = [["wait", "waiting"], ["generate", "generating"], ["tool", "in tools"], ["verify", "being judged"]].map(([kind, what]) => [kind, what, parts.filter(part => part[0] === kind).reduce((sum, part) => sum + part[1], 0)]).filter(one => one[2] >= 0.005);
  return [
    node("div", { class: "timeline" }, node("div", { class: "bar", role: "img", "aria-label": `${show.seconds(all)} in all` }, parts.filter(part => part[1] > 0).map(([kind, seconds, title]) => node("i", { class: kind, title, style: `flex-grow:${seconds / all}` })))),
    node("div", { class: "key" }, kinds.map(([kind, what, seconds]) => node("span", {}, node("i", { class: `swatch ${kind}` }), `${show.seconds(seconds)} ${what}`))),
    node("ul", { class: "placements" }, placements.map(placed => node("li", {}, placementWords(placed)))),
  ];
}

// Why a rollout waited, why it was put where it was, and how full it was there.
function placementWords(placed) {
  const held = Object.entries(placed.held_s).map(([by, seconds]) => `${show.seconds(seconds)} because ${by}`), share = tokens => `${Math.round(100 * tokens / placed.kv_capacity_tokens)} %`;
  const waited = `${placed.turn ? `After turn ${placed.turn} it waited` : "Waited"} ${show.seconds(placed.waited_s)}${held.length ? `, ${held.join(", ")}` : ""}`;
  const went = placed.waited_s < 0.005 ? `${placed.turn ? `After turn ${placed.turn}, at` : "At"} once to` : `${waited}; then`;
  return `${went} ${placed.replica_id}: ${placed.why}. KV there: ${share(placed.kv_used_tokens)} in use, ${placed.kv_expected_tokens ? `${share(placed.kv_expected_tokens)} counted on, ` : ""}of ${show.count(placed.kv_capacity_tokens)} tokens, ${plural(placed.residents, "rollout")} with this one.`;
}

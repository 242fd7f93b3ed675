// ---- several runs on one page: how they end, their courses over each other, what differs

const page = document.getElementById("page"), bar = document.getElementById("bar");
const STATES = { well: "✓", look: "!", bad: "✕", unknown: "?" };
show.tiny = value => value === null ? "–" : value.toExponential(1);
const TICKS = { percent: value => +(100 * value).toFixed(1) + " %", tiny: value => value ? value.toExponential(0) : "0", tokens: value => show.count(Math.round(value)), seconds: value => +value.toFixed(1) + " s", plain: value => +value.toFixed(3) };

// Each run thin, each group's mean bold; pointed at, the means at that step.
function courses(data, chart) {
  const made = card(chart), plot = frame(data, { ...chart, tick: TICKS[chart.unit] }, room(520), 236), at = (course, step) => course.find(point => point[0] === step);
  const draw = (course, kind, colour) => plot.svg.append(shape("path", { d: path(course.map(point => point[0]), course.map(point => Math.min(chart.top, point[1])), plot.x, plot.y), class: kind, stroke: `var(--${colour})` }));
  chart.groups.forEach((group, i) => {
    for (const course of group.runs) draw(course, group.runs.length > 1 ? "thin" : "line", data.groups[i].colour);
    if (group.runs.length > 1) draw(group.mean, "line", data.groups[i].colour);
  });
  hoverable(made, plot, step => {
    const told = chart.groups.map((group, i) => [data.groups[i].name, at(group.mean, step)]).filter(one => one[1]).map(([name, point]) => `${name} ${show[chart.unit](point[1])}`);
    return { text: told.length ? `step ${step}: ${told.join(", ")}` : `step ${step}` };
  });
  made.made.append(plot.svg);
  return made.made;
}

function verdictCell(found) {
  return found === null ? "–" : node("span", {}, node("span", { class: `state ${found[0]}` }, STATES[found[0]]), " ", found[1]);
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent), names = data.runs.map(run => run.name);
  const legend = node("div", { class: "legend" }, data.groups.map(group => node("span", {}, node("i", { style: `background:var(--${group.colour})` }), `${group.name} (${group.runs.join(", ")})`)));
  const parts = [
    section("ends", "How they ended", table(data.head, data.rows, "compared")),
    section("courses", "Over the steps of all stages", legend, node("div", { class: "charts" }, data.charts.map(chart => courses(data, chart)))),
    data.verdicts.length ? section("verdicts", "Is each of them well?", table(["signal", ...names], data.verdicts.map(row => [row[0], ...row.slice(1).map(verdictCell)]), "compared sides")) : "",
    section("time", "Where a step's time went", table(["part", ...names], data.phases, "compared")),
    section("settings", "What differs in their settings", data.settings.length ? table(["setting", ...names], data.settings, "compared sides") : node("p", { class: "note" }, "Nothing.")),
    section("runs", "Where they are", table(["run", "directory; its own page is report.html there"], data.runs.map(run => [run.name, node("code", {}, run.path)]), "compared sides")),
  ];
  bar.append(node("a", { class: "name", href: "#" }, data.title), node("nav", { "aria-label": "sections" }, [["ends", "Ends"], ["courses", "Courses"], ["verdicts", "Verdicts"], ["time", "Time"], ["settings", "Settings"]].map(([id, title]) => node("a", { href: `#${id}` }, title))));
  page.append(node("h1", {}, data.title), ...parts, node("footer", {}, "One file, made from the run directories; it needs no network."));
  document.documentElement.dataset.ready = "true";
}

start();

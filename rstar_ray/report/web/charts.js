// ---- charts over RL steps, with one crosshair for all of them

const charts = [];
// A drawing is as wide as there is room for on a narrow page: a wide one made small cannot be read.
const room = most => Math.min(most, Math.max(280, document.documentElement.clientWidth - 62));
function ticks(top, count, least = 0, low = 0) {
  const rough = (top - low) / count, scale = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(factor => factor * scale).find(candidate => candidate >= Math.max(rough, least)) || least;
  return Array.from({ length: Math.floor((top - low) / step + 1e-9) + 1 }, (_, i) => low + i * step);
}
function frame(data, spec, width, height) {
  const box = { left: 46, right: width - 10, top: 22, bottom: height - 26 };
  const xEnd = Math.max(1, ...data.spans.map(span => span.end));
  const x = step => box.left + (box.right - box.left) * step / xEnd;
  const low = spec.bottom || 0, y = value => box.bottom - (box.bottom - box.top) * (value - low) / (spec.top - low);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.title });
  data.spans.forEach((span, i) => {
    if (i % 2 === 0) svg.append(shape("rect", { x: x(span.start), y: box.top, width: x(span.end) - x(span.start), height: box.bottom - box.top, class: "band" }));
    if (span.start) svg.append(shape("line", { x1: x(span.start), x2: x(span.start), y1: box.top, y2: box.bottom, class: "bound" }));
    svg.append(shape("text", { x: (x(span.start) + x(span.end)) / 2, y: box.top - 7, "text-anchor": "middle" }, span.title));
  });
  for (const tick of ticks(spec.top, 5, 0, low)) {
    svg.append(shape("line", { x1: box.left, x2: box.right, y1: y(tick), y2: y(tick), class: "grid" }));
    svg.append(shape("text", { x: box.left - 8, y: y(tick) + 4, "text-anchor": "end" }, spec.tick(tick)));
  }
  for (const tick of ticks(xEnd, 6, 1)) svg.append(shape("text", { x: x(tick), y: box.bottom + 17, "text-anchor": "middle" }, tick));
  return { svg, box, x, y, xEnd, data };
}
function path(xs, ys, x, y) {
  let drawing = "", pen = false;
  ys.forEach((value, i) => {
    if (value === null) { pen = false; return; }
    drawing += `${pen ? "L" : "M"}${x(xs[i]).toFixed(1)},${y(value).toFixed(1)}`;
    pen = true;
  });
  return drawing;
}
function card(spec, wide) {
  const read = node("div", { class: "read" });
  const made = node("div", { class: wide ? "card wide" : "card" }, node("div", { class: "head" }, spec.title), read);
  return { made, read };
}
function stepAt(plot, event) {
  const rect = plot.svg.getBoundingClientRect(), across = (event.clientX - rect.left) / rect.width * plot.svg.viewBox.baseVal.width;
  const step = Math.round((across - plot.box.left) / (plot.box.right - plot.box.left) * plot.xEnd);
  return Math.min(plot.xEnd, Math.max(0, step));
}
function hoverable(made, plot, describe) {
  const line = shape("line", { y1: plot.box.top, y2: plot.box.bottom, class: "cross", visibility: "hidden" });
  const dot = shape("circle", { r: 4, class: "dot", visibility: "hidden" });
  plot.svg.append(line, dot);
  charts.push(step => {
    const at = step === null ? null : describe(step);
    made.read.textContent = at ? at.text : "";
    line.setAttribute("visibility", step === null ? "hidden" : "visible");
    dot.setAttribute("visibility", at && at.y !== null && at.y !== undefined ? "visible" : "hidden");
    if (step !== null) { line.setAttribute("x1", plot.x(step)); line.setAttribute("x2", plot.x(step)); }
    if (at && at.y !== null && at.y !== undefined) { dot.setAttribute("cx", plot.x(at.x)); dot.setAttribute("cy", plot.y(at.y)); dot.setAttribute("fill", `var(--${at.colour})`); }
  });
  plot.svg.addEventListener("pointermove", event => { const step = stepAt(plot, event); for (const chart of charts) chart(step); });
  plot.svg.addEventListener("pointerleave", () => { for (const chart of charts) chart(null); });
}
function where(data, step) {
  const span = data.spans.find(candidate => step > candidate.start && step <= candidate.end);
  return span ? `${span.title}, step ${step - span.start}` : "before RL";
}
function lineChart(data, spec) {
  const made = card(spec), plot = frame(data, spec, room(520), 236);
  plot.svg.append(shape("path", { d: path(data.x, spec.values, plot.x, plot.y), class: "thin", stroke: `var(--${spec.colour})` }));
  plot.svg.append(shape("path", { d: path(data.x, spec.smooth, plot.x, plot.y), class: "line", stroke: `var(--${spec.colour})` }));
  hoverable(made, plot, step => {
    const i = data.x.indexOf(step);
    return i < 0 ? { text: where(data, step) } : { x: step, y: spec.values[i], colour: spec.colour, text: `${where(data, step)}: ${spec.show(spec.values[i])}` };
  });
  made.made.append(plot.svg);
  return made.made;
}
function pointChart(data, spec) {
  const made = card(spec), plot = frame(data, spec, room(520), 236), points = data.heldout;
  for (const point of points) plot.svg.append(shape("line", { x1: plot.x(point.x), x2: plot.x(point.x), y1: plot.y(point.low), y2: plot.y(point.high), stroke: `var(--${spec.colour})`, "stroke-opacity": .35, "stroke-width": 4 }));
  plot.svg.append(shape("path", { d: path(points.map(p => p.x), points.map(p => p.y), plot.x, plot.y), class: "line", stroke: `var(--${spec.colour})` }));
  for (const point of points) plot.svg.append(shape("circle", { cx: plot.x(point.x), cy: plot.y(point.y), r: 4, fill: `var(--${spec.colour})` }));
  hoverable(made, plot, step => {
    const near = points.reduce((best, p) => Math.abs(p.x - step) < Math.abs(best.x - step) ? p : best);
    return { x: near.x, y: near.y, colour: spec.colour, text: `${where(data, near.x)}: ${show.percent(near.y)} (${(100 * near.low).toFixed(1)} to ${(100 * near.high).toFixed(1)})` };
  });
  made.made.append(plot.svg);
  return made.made;
}

// Layers on each other, a column for each step; `pick` is called with the step that a person points out.
function layerChart(data, { title, top, tick, layers, unit, pick }) {
  const made = card({ title }, true), plot = frame(data, { title, top, tick }, room(1060), 230), base = data.x.map(() => 0);
  for (const layer of layers) {
    let above = "", below = "";
    data.x.forEach((step, i) => {
      const left = plot.x(Math.max(0, step - 1)).toFixed(1), right = plot.x(step).toFixed(1);
      const high = plot.y(Math.min(top, base[i] + layer.values[i])).toFixed(1), low = plot.y(Math.min(top, base[i])).toFixed(1);
      above += `${i ? "L" : "M"}${left},${high}L${right},${high}`;
      below = `L${right},${low}L${left},${low}` + below;
      base[i] += layer.values[i];
    });
    plot.svg.append(shape("path", { d: above + below + "Z", fill: `var(--${layer.colour})`, "fill-opacity": .9 }));
  }
  for (const span of data.spans) if (span.start) plot.svg.append(shape("line", { x1: plot.x(span.start), x2: plot.x(span.start), y1: plot.box.top, y2: plot.box.bottom, class: "gap" }));
  hoverable(made, plot, step => {
    const i = data.x.indexOf(step);
    return { text: i < 0 ? where(data, step) : `${where(data, step)}: ` + layers.map(layer => `${layer.name} ${unit(layer.values[i])}`).join(", ") };
  });
  if (pick) {
    plot.svg.classList.add("picks");
    plot.svg.addEventListener("click", event => pick(Math.max(1, stepAt(plot, event))));
  }
  made.made.append(plot.svg, node("div", { class: "legend" }, layers.map(layer => node("span", {}, node("i", { style: `background:var(--${layer.colour})` }), layer.label || layer.name))));
  return made.made;
}
function familyChart(families) {
  const title = "Held-out pass@1 by family: before RL (ring) and at the end (dot)", made = card({ title }, true);
  const height = 26 * families.length + 26, width = room(1060), left = Math.min(150, .36 * width), right = width - 20, x = value => left + (right - left) * value;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const tick of [0, .2, .4, .6, .8, 1]) {
    svg.append(shape("line", { x1: x(tick), x2: x(tick), y1: 6, y2: height - 22, class: "grid" }));
    svg.append(shape("text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, Math.round(100 * tick) + " %"));
  }
  families.forEach((family, i) => {
    const y = 19 + 26 * i;
    svg.append(shape("text", { x: left - 14, y: y + 4, "text-anchor": "end" }, family.name));
    svg.append(shape("line", { x1: x(family.before), x2: x(family.after), y1: y, y2: y, class: "bound", "stroke-width": 3 }));
    for (const [value, fill, stroke] of [[family.before, "var(--card)", "var(--muted)"], [family.after, "var(--green)", "var(--green)"]]) {
      const dot = shape("circle", { cx: x(value), cy: y, r: 5, fill, stroke, "stroke-width": 1.5 });
      dot.append(shape("title", {}, show.percent(value)));
      svg.append(dot);
    }
  });
  made.made.append(svg);
  return made.made;
}
function sftChart(sft) {
  const made = card({ title: sft.title }, false), width = room(1060), height = 230;
  const box = { left: 46, right: width - 10, top: 8, bottom: height - 26 };
  const points = [...sft.training, ...sft.validation].filter(point => point[1] > 0), xEnd = Math.max(...points.map(point => point[0]));
  const low = Math.log10(Math.min(...points.map(point => point[1]))), high = Math.log10(Math.max(...points.map(point => point[1])));
  const x = step => box.left + (box.right - box.left) * step / xEnd;
  const y = loss => box.bottom - (box.bottom - box.top) * (Math.log10(loss) - low) / Math.max(high - low, 1e-9);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": sft.title });
  for (let power = Math.floor(low); power <= high; power++) for (const factor of [1, 2, 5]) {
    const loss = factor * 10 ** power;
    if (Math.log10(loss) < low || Math.log10(loss) > high) continue;
    svg.append(shape("line", { x1: box.left, x2: box.right, y1: y(loss), y2: y(loss), class: "grid" }));
    svg.append(shape("text", { x: box.left - 8, y: y(loss) + 4, "text-anchor": "end" }, +loss.toPrecision(1)));
  }
  for (const tick of ticks(xEnd, 6, 1)) svg.append(shape("text", { x: x(tick), y: box.bottom + 17, "text-anchor": "middle" }, tick));
  const legend = node("div", { class: "legend" });
  for (const name of ["training", "validation"]) {
    if (!sft[name].length) continue;
    const colour = `var(--${sft[name + "_colour"]})`;
    svg.append(shape("path", { d: path(sft[name].map(p => p[0]), sft[name].map(p => p[1] > 0 ? p[1] : null), x, y), class: "line", stroke: colour }));
    legend.append(node("span", {}, node("i", { style: `background:${colour}` }), name));
  }
  const line = shape("line", { y1: box.top, y2: box.bottom, class: "cross", visibility: "hidden" });
  svg.append(line);
  svg.addEventListener("pointermove", event => {
    const rect = svg.getBoundingClientRect(), across = (event.clientX - rect.left) / rect.width * width;
    const step = (across - box.left) / (box.right - box.left) * xEnd;
    const near = list => list.reduce((best, p) => Math.abs(p[0] - step) < Math.abs(best[0] - step) ? p : best);
    const at = near(sft.training), validated = sft.validation.length ? near(sft.validation) : null;
    line.setAttribute("visibility", "visible"); line.setAttribute("x1", x(at[0])); line.setAttribute("x2", x(at[0]));
    made.read.textContent = `step ${at[0]}: ${at[1].toPrecision(3)}` + (validated ? `, validation ${validated[1].toPrecision(3)} at step ${validated[0]}` : "");
  });
  svg.addEventListener("pointerleave", () => { line.setAttribute("visibility", "hidden"); made.read.textContent = ""; });
  made.made.append(svg, legend);
  return made.made;
}

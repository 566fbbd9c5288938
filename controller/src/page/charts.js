"use strict";
// Line charts as SVG. Data reaches the document as text nodes and numbers only.

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** About `count` round numbers from low to high. */
function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) found.push(v);
  return found;
}

function decades(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) found.push(10 ** p);
  return found;
}

function scale(low, high, from, to, log) {
  const f = log ? Math.log10 : (v) => v;
  const [a, b] = [f(low), f(high)];
  return (v) => from + ((f(v) - a) / (b - a || 1)) * (to - from);
}

/** Straight from point to point, or in steps. Nulls leave a gap. */
function outline(points, x, y, steps) {
  let path = "";
  let last = null;
  for (const [px, py] of points) {
    if (py === null || !Number.isFinite(py)) { last = null; continue; }
    const [sx, sy] = [x(px).toFixed(1), y(py).toFixed(1)];
    if (last === null) path += `M${sx} ${sy}`;
    else path += steps ? `H${sx}V${sy}` : `L${sx} ${sy}`;
    last = py;
  }
  return path;
}

/**
 * series: [{name, style, dash, steps, right, points: [[x, y|null]]}]; options: {format, log, marks: [{x, label}],
 * formatX, formatRight, empty}. A series with `right` has an axis of its own, from 0 to 1.
 */
function lineChart(box, series, options) {
  const values = series.filter((s) => !s.right).flatMap((s) => s.points.map((p) => p[1])).filter((v) => v !== null && Number.isFinite(v));
  const xs = series.flatMap((s) => s.points.map((p) => p[0]));
  if (values.length < 2) {
    const note = document.createElement("div");
    note.className = "none";
    note.textContent = options.empty;
    box.replaceChildren(note);
    return;
  }
  const [width, height] = [Math.max(box.clientWidth, 240), box.clientHeight || 190];
  const right = series.some((s) => s.right);
  const area = { left: 56, right: width - (right ? 42 : 10), top: 8, bottom: height - 22 };
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (options.log) [low, high] = [low / 1.3, high * 1.3];
  else [low, high] = [Math.min(0, low), high * 1.08 || 1];
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const x = scale(first, last, area.left, area.right, false);
  const y = scale(low, high, area.bottom, area.top, options.log);
  const yRight = scale(0, 1, area.bottom, area.top, false);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const label = (text, at, attributes) => root.append(svg("text", { x: at[0], y: at[1], ...attributes }, text));
  const lines = options.log ? decades(low, high).filter((v) => v >= low && v <= high) : ticks(low, high, 4);
  for (const v of lines) {
    root.append(svg("line", { class: "axis", x1: area.left, x2: area.right, y1: y(v), y2: y(v) }));
    label(options.format(v), [area.left - 8, y(v) + 4], { "text-anchor": "end" });
  }
  if (right) for (const v of [0, 0.5, 1]) label(options.formatRight(v), [area.right + 6, yRight(v) + 4], {});
  const acrossX = ticks(first, last, Math.max(2, Math.floor(width / 110))).filter((v) => v >= first && v <= last);
  for (const v of acrossX) label(options.formatX(v), [x(v), height - 5], { "text-anchor": "middle" });
  let free = -Infinity;
  for (const mark of options.marks || []) {
    if (mark.x < first || mark.x > last) continue;
    root.append(svg("line", { class: "mark", x1: x(mark.x), x2: x(mark.x), y1: area.top, y2: area.bottom }));
    if (x(mark.x) > free) {
      label(mark.label, [x(mark.x) + 3, area.top + 8], { class: "mark-text" });
      free = x(mark.x) + 26;
    }
  }
  for (const s of series) {
    const on = s.right ? yRight : y;
    root.append(svg("path", { class: `s-${s.style}${s.dash ? " dash" : ""}`, d: outline(s.points, x, on, s.steps) }));
  }
  box.replaceChildren(root);
  hover(box, root, { series, options, x, y, yRight, area });
}

function hover(box, root, c) {
  const cross = svg("line", { class: "cross", y1: c.area.top, y2: c.area.bottom, visibility: "hidden" });
  const dots = c.series.map((s) => svg("circle", { class: `s-${s.style}`, r: 4, visibility: "hidden" }));
  root.append(cross, ...dots);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  box.append(tip);
  const hide = () => { tip.hidden = true; for (const n of [cross, ...dots]) n.setAttribute("visibility", "hidden"); };
  root.addEventListener("mouseleave", hide);
  root.addEventListener("mousemove", (event) => {
    const bounds = root.getBoundingClientRect();
    const at = event.clientX - bounds.left;
    let best = null;
    for (const s of c.series) for (const p of s.points) if (best === null || Math.abs(c.x(p[0]) - at) < Math.abs(c.x(best) - at)) best = p[0];
    if (best === null) return hide();
    const sx = c.x(best);
    cross.setAttribute("x1", sx); cross.setAttribute("x2", sx); cross.setAttribute("visibility", "visible");
    const rows = [`${c.options.nameX} ${c.options.formatX(best)}`];
    c.series.forEach((s, i) => {
      const point = s.points.find((p) => p[0] === best);
      const seen = point && point[1] !== null && Number.isFinite(point[1]);
      dots[i].setAttribute("visibility", seen ? "visible" : "hidden");
      if (!seen) return;
      dots[i].setAttribute("cx", sx); dots[i].setAttribute("cy", (s.right ? c.yRight : c.y)(point[1]));
      rows.push(`${s.name} ${(s.right ? c.options.formatRight : c.options.format)(point[1])}`);
    });
    tip.replaceChildren(...rows.flatMap((text, i) => (i ? [document.createElement("br"), text] : [text])));
    tip.hidden = false;
    const wide = tip.offsetWidth;
    tip.style.left = `${sx + wide + 14 > bounds.width ? sx - wide - 10 : sx + 10}px`;
  });
}

// Charts as SVG, in the little that this page needs: lines, steps, dots and areas over one x axis.
// A chart is drawn anew from data each time; colours come from the style sheet's variables.

const SPACE = { left: 46, right: 10, top: 8, bottom: 22 };
const NS = "http://www.w3.org/2000/svg";

export const PALETTE = [
  "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#d4a72c",
];

function node(name, attributes = {}, text = null) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

// Round numbers that cover [low, high] in about `count` parts.
export function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const found = [];
  for (let at = first; at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (Number.isInteger(value)) return String(value);
  return String(+value.toPrecision(3));
}

// series: [{name, color, x: [], y: [], kind: "line" | "step" | "dots" | "area", base: []}]
// options: {xText: x => text, xWhole, yMin, yWhole, empty}
export function chart(box, series, options = {}) {
  const shown = series.filter((one) => one.x.length > 0);
  const key = legend(shown);
  box.replaceChildren(key);
  const width = Math.max(200, box.clientWidth);
  const height = Math.max(80, box.clientHeight - key.offsetHeight);
  const picture = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  box.append(picture);
  if (shown.length === 0) {
    const place = { x: width / 2, y: height / 2, "text-anchor": "middle", class: "empty" };
    picture.append(node("text", place, options.empty || "nothing yet"));
    return;
  }
  const scale = scales(shown, options, width, height);
  axes(picture, scale, options, width, height);
  for (const one of shown) picture.append(...marks(one, scale));
  follow(picture, shown, scale, options, height);
}

function scales(shown, options, width, height) {
  const xs = shown.flatMap((one) => one.x), ys = shown.flatMap((one) => one.y);
  const extent = (list) => list.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)],
    [Infinity, -Infinity]);
  let [x0, x1] = extent(xs), [y0, y1] = extent(ys);
  if (x1 === x0) { x0 -= 0.5; x1 += 0.5; }
  if (options.yMin !== undefined) y0 = Math.min(options.yMin, y0);
  if (y1 - y0 < 1e-9) y1 = y0 + 1;
  y1 += (y1 - y0) * 0.06;
  const inner = { width: width - SPACE.left - SPACE.right,
    height: height - SPACE.top - SPACE.bottom };
  return {
    x0, x1, y0, y1,
    x: (v) => SPACE.left + (v - x0) / (x1 - x0) * inner.width,
    y: (v) => SPACE.top + (1 - (v - y0) / (y1 - y0)) * inner.height,
  };
}

function axes(picture, scale, options, width, height) {
  const rows = Math.max(2, Math.round((height - 30) / 36));
  for (const value of ticks(scale.y0, scale.y1, rows)) {
    if (options.yWhole && !Number.isInteger(value)) continue;
    const y = scale.y(value);
    picture.append(node("line", { x1: SPACE.left, x2: width - SPACE.right, y1: y, y2: y,
      class: "grid" }));
    picture.append(node("text", { x: SPACE.left - 8, y: y + 4, "text-anchor": "end" },
      short(+value.toPrecision(12))));
  }
  const columns = Math.max(2, Math.round(width / 110));
  for (const value of ticks(scale.x0, scale.x1, columns)) {
    if (options.xWhole && !Number.isInteger(value)) continue;
    const text = options.xText ? options.xText(value) : short(+value.toPrecision(12));
    const x = Math.min(scale.x(value), width - 14);
    picture.append(node("text", { x, y: height - 6, "text-anchor": "middle" }, text));
  }
  const y = height - SPACE.bottom;
  picture.append(node("line", { x1: SPACE.left, x2: width - SPACE.right, y1: y, y2: y,
    class: "axis" }));
}

function marks(one, scale) {
  const points = one.x.map((x, at) => [scale.x(x), scale.y(one.y[at])]);
  if (one.kind === "dots") {
    return points.map(([cx, cy]) => node("circle", { cx, cy, r: 2.6, fill: one.color,
      "fill-opacity": 0.85 }));
  }
  const place = ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  if (one.kind === "area") {
    const under = one.x.map((x, at) => [scale.x(x), scale.y(one.base ? one.base[at] : 0)]);
    const around = [...points, ...under.reverse()].map(place).join("L");
    return [node("path", { d: `M${around}Z`, fill: one.color, "fill-opacity": 0.75 })];
  }
  let d = `M${place(points[0])}`;
  points.slice(1).forEach(([x, y], at) => {
    d += one.kind === "step" ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `L${place([x, y])}`;
  });
  const look = { d, fill: "none", stroke: one.color, "stroke-width": one.width || 1.8,
    "stroke-linejoin": "round" };
  if (points.length === 1) {
    return [node("circle", { cx: points[0][0], cy: points[0][1], r: 3, fill: one.color })];
  }
  return [node("path", look)];
}

function legend(shown) {
  const made = document.createElement("div");
  made.className = "legend";
  for (const one of shown.filter((each) => each.name)) {
    const mark = document.createElement("i");
    mark.style.background = one.color;
    const entry = document.createElement("span");
    entry.append(mark, one.name);
    made.append(entry);
  }
  return made;
}

// The values under the pointer, as the chart's title and a thin line.
function follow(picture, shown, scale, options, height) {
  const line = node("line", { y1: SPACE.top, y2: height - SPACE.bottom, class: "cursor" });
  const title = node("title");
  picture.append(title);
  picture.addEventListener("pointermove", (event) => {
    const at = scale.x0 + (event.offsetX - scale.x(scale.x0))
      / (scale.x(scale.x1) - scale.x(scale.x0)) * (scale.x1 - scale.x0);
    const words = shown.filter((one) => one.name).map((one) => {
      let best = 0;
      one.x.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(one.x[best] - at)) best = i; });
      const where = options.xText ? options.xText(one.x[best]) : short(one.x[best]);
      return `${where}: ${one.name} ${short(one.y[best])}`;
    });
    title.textContent = words.join("\n");
    line.setAttribute("x1", scale.x(at));
    line.setAttribute("x2", scale.x(at));
    if (!line.parentNode) picture.append(line);
  });
  picture.addEventListener("pointerleave", () => line.remove());
}

"use strict";
// From numbers to Plotly's figures. Nothing here knows the page around them.

const INK = "#16161d";
const GRID = "#e3e3e8";
/** Strong enough on white at both ends; the order stays readable in black and white. */
const RAMP = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369"];
const SYMBOLS = ["circle", "square", "diamond", "cross", "x", "triangle-up", "triangle-down", "star"];

/** Text for Plotly, which reads some HTML in names: shown as it is, and not longer than `length`. */
function plain(text, length = Infinity) {
  const short = text.length > length ? `${text.slice(0, length - 1)}…` : text;
  return short.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** A long text over several lines, for hovering. */
function folded(text) {
  const lines = text.match(/.{1,46}(?:[ ,]|$)|.{46}/g) || [text];
  return lines.map((line) => plain(line)).join("<br>");
}

/** What all charts have in common, with room below for a legend of `names`. */
function layout(width, names, more = {}) {
  const narrow = width < 480;
  // Plotly gives every name in a legend the width of the longest.
  const columns = Math.max(1, Math.floor((width - 10) / (46 + 7.1 * Math.max(0, ...names.map((name) => name.length)))));
  const legend = names.length ? 20 * Math.ceil(names.length / columns) + 6 : 0;
  return {
    height: (narrow ? 280 : 340) + legend,
    margin: { l: 52, r: 12, t: 26, b: 46 + legend },
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", size: narrow ? 12 : 13,
      color: INK },
    paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    hoverlabel: { bgcolor: "#fff", bordercolor: INK, font: { color: INK }, align: "left", namelength: -1 },
    showlegend: names.length > 0,
    legend: { orientation: "h", x: 0, xanchor: "left", y: 0, yanchor: "bottom", yref: "container",
      itemclick: "toggle", itemdoubleclick: "toggleothers", groupclick: "togglegroup", tracegroupgap: 0,
      font: { size: 12 } },
    hovermode: "closest",
    // On a touch screen a finger scrolls the page instead of zooming into a chart.
    dragmode: window.matchMedia("(pointer: coarse)").matches ? false : "zoom",
    ...more,
  };
}

const CONFIG = { responsive: true, displaylogo: false,
  displayModeBar: window.matchMedia("(hover: none)").matches ? false : "hover",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  toImageButtonOptions: { format: "svg", filename: "gradmem" } };

function axis(title, more = {}) {
  return { title: { text: title, standoff: 8 }, gridcolor: GRID, zerolinecolor: "#8a8a94", linecolor: "#8a8a94",
    ticks: "outside", tickcolor: "#8a8a94", automargin: true, ...more };
}

/** Logarithmic where values spread over more than a factor of ten, with marks at 1, 2 and 5. */
function spread(title, values) {
  const positive = values.filter((value) => value > 0);
  const [least, most] = [Math.min(...positive), Math.max(...positive)];
  if (positive.length < values.length || most <= 10 * least) {
    return axis(title, { rangemode: "tozero", autorangeoptions: { clipmin: 0 } });
  }
  const places = [];
  for (let ten = 10 ** Math.floor(Math.log10(least)); ten <= most * 2; ten *= 10) {
    places.push(...(most > 1000 * least ? [ten] : [ten, 2 * ten, 5 * ten]));
  }
  return axis(title, { type: "log", tickvals: places, ticktext: places.map((value) => value.toLocaleString("en")) });
}

/** ACC, as wide as its values; of bounded scores all of it for one value, which has no width. */
function accuracies(values, { score, bounded }) {
  const title = score === "accuracy" ? "ACC" : `ACC (${plain(score, 30)})`;
  if (!bounded) return axis(title, values.length > 1 ? {} : { rangemode: "tozero" });
  return axis(title, values.length > 1 ? { autorangeoptions: { clipmin: 0, clipmax: 1.02 } } : { range: [0, 1.02] });
}

/** Scores over time: from 0 to 1 if they all are, else as they are. */
function scoreAxis(title, { bounded }) {
  return axis(title, bounded ? { range: [0, 1.02] } : {});
}

function errors(estimates, more = {}) {
  const half = estimates.map((estimate) => estimate.half || 0);
  return { type: "data", array: half, visible: half.some((value) => value > 0), color: INK, thickness: 1.2, width: 3,
    ...more };
}

/** What tells a learner's rows from each other. */
function variant(row, data) {
  return data.variants[row.place % data.variants.length];
}

/** A learner's fill; its second row and so on are paler, some with dark lines. */
function fill(row, data) {
  const style = data.learners[row.learner];
  const { shade, ruled } = variant(row, data);
  const colour = paler(style.colour, shade);
  return { color: colour, line: { color: INK, width: 0.8 },
    pattern: { shape: ruled ? "|" : style.pattern, fillmode: "overlay", bgcolor: colour,
      fgcolor: ruled ? INK : "#fff", size: 7, solidity: 0.28 } };
}

/** Intervals on bars: dark with a white rim, to be seen on any of them. */
function whiskers(x, estimates, group) {
  const bare = { type: "scatter", mode: "markers", x, y: estimates.map(({ mean }) => (Number.isNaN(mean) ? null : mean)),
    marker: { opacity: 0, size: 1 }, hoverinfo: "skip", showlegend: false, legendgroup: group };
  const rim = errors(estimates, { color: "#fff", thickness: 3.6, width: 4 });
  return rim.visible ? [{ ...bare, error_y: rim }, { ...bare, error_y: errors(estimates) }] : [];
}

/** "#rrggbb", the given part of the way to white. */
function paler(colour, part) {
  const parts = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return `rgb(${parts.map((value) => Math.round(value + (255 - value) * part)).join(",")})`;
}

/** A learner's mark; open, with a dot or both for its second row and so on. */
function mark(row, data, size) {
  const style = data.learners[row.learner];
  const { open, dotted } = variant(row, data);
  return { symbol: `${style.symbol}${open ? "-open" : ""}${dotted ? "-dot" : ""}`, size: dotted ? size + 1.5 : size,
    color: style.colour, line: { color: open ? style.colour : dotted ? "#fff" : INK, width: open ? 1.6 : dotted ? 1.2 : 0.6 } };
}

/** Bars side by side, one for each row in each group: `group.of(row)` is an estimate. */
function barChart(rows, groups, data, width) {
  const step = Math.min(0.86 / rows.length, 0.2);
  const traces = rows.flatMap((row, i) => {
    const found = groups.map((group) => group.of(row));
    const x = groups.map((_, g) => g + (i - (rows.length - 1) / 2) * step);
    return [{
      type: "bar", name: plain(row.label, 44), showlegend: true, legendgroup: String(i),
      x, y: found.map(({ mean }) => (Number.isNaN(mean) ? null : mean)),
      width: step * 0.92, marker: fill(row, data),
      customdata: groups.map((group, g) =>
        `${folded(row.name)}<br>${group.name}: ${format(found[g], group.digits === undefined ? row.digits : group.digits, group.signed)}${some(found[g], row)}`),
      hovertemplate: "%{customdata}<extra></extra>",
    }, ...whiskers(x, found, String(i))];
  });
  const marks = rows.flatMap((row, i) => groups.map((group, g) => ({
    x: g + (i - (rows.length - 1) / 2) * step, y: group.published ? group.published(row) : undefined,
    text: `${folded(row.learner)}, ${plain(data.published)}<br>${group.name}: `,
  }))).filter((one) => one.y !== undefined && one.y !== null);
  if (marks.length) {
    traces.push({ type: "scatter", mode: "markers", name: data.published, showlegend: true,
      x: marks.map((one) => one.x), y: marks.map((one) => one.y),
      customdata: marks.map((one) => one.text + one.y.toFixed(3)), hovertemplate: "%{customdata}<extra></extra>",
      marker: { symbol: "diamond", size: 8, color: "#fff", line: { color: "#000", width: 1.6 } } });
  }
  const below = layout(width, traces.filter((trace) => trace.showlegend).map((trace) => trace.name));
  return { traces, layout: { ...below,
    margin: { ...below.margin, b: below.margin.b - 16 },
    barmode: "overlay", // they stand where `x` says
    xaxis: axis("", { tickvals: groups.map((_, g) => g), ticktext: groups.map((group) => group.label),
      range: [-0.55, groups.length - 0.45], fixedrange: true, showgrid: false, zeroline: false, ticks: "" }),
    yaxis: axis(groups.length === 1 ? groups[0].name : rows[0].score === "accuracy" ? "" : plain(rows[0].score, 40),
      { rangemode: "tozero" }),
  } };
}

/** How many of a row's seeds have a number, if not all. */
function some({ n }, { seeds }) {
  return n !== undefined && n < seeds ? ` (${n} of ${seeds} seeds)` : "";
}

/** Scores over examples observed: `curves` has a name, a row and points for each line. */
function curveChart(curves, title, data, width) {
  return { traces: curves.map(({ row, points }) => ({
    type: "scatter", mode: "lines+markers", name: plain(row.label, 44),
    x: points.map(([examples]) => examples), y: points.map(([, { mean }]) => mean),
    line: { color: data.learners[row.learner].colour, width: 2.2, dash: variant(row, data).dash },
    marker: { ...mark(row, data, 7), maxdisplayed: 14 },
    customdata: points.map(([examples, found]) =>
      `${folded(row.name)}<br>${examples.toLocaleString("en")} examples: ${format(found, row.digits)}`),
    hovertemplate: "%{customdata}<extra></extra>",
  })), layout: layout(width, curves.map(({ row }) => plain(row.label, 44)), {
    xaxis: axis("examples observed", { rangemode: "tozero" }),
    yaxis: scoreAxis(title, curves.length ? curves[0].row : { bounded: true }),
    shapes: curves.flatMap(({ row }) => boundaryLines(row, data)),
  }) };
}

/** Thin vertical lines where a learner without task labels found that a task begins. */
function boundaryLines(row, data) {
  return row.runs.flatMap(({ boundaries }) => boundaries.map((x) => ({
    type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, layer: "below", opacity: 0.5 / row.runs.length,
    line: { color: data.learners[row.learner].colour, width: 0.8 },
  })));
}

/** Every task's curve of one row: dark first, light last. */
function taskChart(view, curves, tasks, width, height) {
  const T = curves.length;
  const names = taskNames(tasks, T).map((name) => plain(`task ${name}`));
  return { traces: curves.map((points, j) => ({
    type: "scatter", mode: "lines+markers", name: names[j], showlegend: T <= 10,
    x: points.map(([examples]) => examples), y: points.map(([, { mean }]) => mean),
    line: { color: RAMP[T > 1 ? Math.round(j * (RAMP.length - 1) / (T - 1)) : 0], width: 1.8 },
    marker: { symbol: SYMBOLS[j % SYMBOLS.length], size: 5.5, maxdisplayed: 10 },
    customdata: points.map(([examples, found]) =>
      `${folded(`task ${j + 1}${tasks[j] ? ` (${tasks[j]})` : ""}`)}<br>${examples.toLocaleString("en")} examples: ${format(found, view.digits)}`),
    hovertemplate: "%{customdata}<extra></extra>",
  })), layout: layout(width, T <= 10 ? names : [], {
    ...(width < 480 ? {} : { height: Math.max(height, 340) }),
    xaxis: axis("examples observed", { rangemode: "tozero" }), yaxis: scoreAxis(plain(view.score, 40), view),
  }) };
}

/** ACC over examples remembered: `lines` are rows of one kind, least memory first. */
function memoryChart(lines, data, width) {
  const sizes = lines.flatMap(({ rows }) => rows.map((row) => row.memory));
  return { traces: lines.map(({ name, rows }, i) => {
    const place = lines.slice(0, i).filter((other) => other.rows[0].learner === rows[0].learner).length;
    const row = { ...rows[0], place };
    return {
      type: "scatter", mode: "lines+markers", name: plain(name, 44),
      x: rows.map((one) => one.memory), y: rows.map((one) => one.acc.mean), error_y: errors(rows.map((one) => one.acc)),
      line: { color: data.learners[row.learner].colour, width: 2.2, dash: variant(row, data).dash },
      marker: mark(row, data, 9),
      customdata: rows.map((one) =>
        `${folded(one.name)}<br>${one.memory.toLocaleString("en")} examples remembered<br>ACC ${format(one.acc, one.digits)}`),
      hovertemplate: "%{customdata}<extra></extra>",
    };
  }), layout: layout(width, lines.map(({ name }) => plain(name, 44)), {
    xaxis: spread("examples remembered in all", sizes), yaxis: accuracies(sizes, lines[0].rows[0]),
  }) };
}

/** Rows up to which a chart of ACC over seconds tells each of them from the others. */
const TOLD_APART = 16;

/** ACC over seconds: a mark and a name in the legend for each row; of very many, for each learner. */
function timeChart(rows, data, width) {
  const groups = rows.length <= TOLD_APART
    ? rows.map((row) => ({ first: row, name: plain(row.label, 44), own: [row] }))
    : [...new Set(rows.map((row) => row.learner))].map((learner) => (
      { first: { learner, place: 0 }, name: plain(learner, 34), own: rows.filter((row) => row.learner === learner) }));
  const many = rows.length > 40;
  return { traces: groups.map(({ first, name, own }) => ({
    type: "scatter", mode: "markers", name, showlegend: true,
    x: own.map((row) => row.seconds.mean), y: own.map((row) => row.acc.mean),
    ...(many ? {} : { error_x: errors(own.map((row) => row.seconds)), error_y: errors(own.map((row) => row.acc)) }),
    marker: { ...mark(first, data, many ? 8 : 11), opacity: many ? 0.75 : 1,
      ...(variant(first, data).ruled ? { color: paler(data.learners[first.learner].colour, 0.5) } : {}) },
    customdata: own.map((row) =>
      `${folded(row.name)}<br>${format(row.seconds, 1)} seconds<br>ACC ${format(row.acc, row.digits)}`),
    hovertemplate: "%{customdata}<extra></extra>",
  })), layout: layout(width, groups.map(({ name }) => name), {
    xaxis: spread("seconds", rows.map((row) => row.seconds.mean)), yaxis: accuracies(rows, rows[0]),
  }) };
}

"use strict";
// The heat map of R on the page; `pictures/heat_map.py` draws the one for papers.

/** R, with values on hover, and in the cells where they fit. */
function heatMap(view, R, learned, tasks, width) {
  const T = R[0].length;
  const names = taskNames(tasks, T);
  const values = R.flat().filter((value) => value !== null);
  const [low, high] = view.bounded ? [0, 1] : [Math.min(...values), Math.max(...values)];
  const score = plain(view.score, 40);
  const task = (j) => (tasks[j] ? folded(`task ${j + 1} (${tasks[j]})`) : `task ${j + 1}`);
  const after = (i) => (learned && learned[i] !== null && learned[i] !== undefined
    ? task(learned[i]) : `all data, in ${R.length} part${R.length > 1 ? "s" : ""}`);
  const narrow = width < 480; // the scale goes below, where it takes no width from the cells
  const cell = Math.max(narrow ? 0 : 8, Math.min(width - (narrow ? 62 : 130), 460) / T);
  const few = T <= 12;
  return { traces: [{
    type: "heatmap", z: R, zmin: low, zmax: high, colorscale: "Cividis", xgap: few ? 1 : 0, ygap: few ? 1 : 0,
    x: R[0].map((_, j) => j + 1), y: R.map((_, i) => i + 1),
    customdata: R.map((row, i) => row.map((value, j) => `after ${after(i)}<br>tested on ${task(j)}<br>${score} <b>${
      value === null ? "–" : scoreText(view, value, 4)}</b>`)),
    hovertemplate: "%{customdata}<extra></extra>",
    colorbar: { thickness: 12, outlinewidth: 0, tickformat: view.bounded ? ".1f" : "~g", title: { text: score, side: "right" },
      ...(narrow ? { orientation: "h", y: 0, yref: "container", yanchor: "bottom", title: { text: "" } } : {}) },
  }, ...(few && cell >= 26 ? [written(view, R, cell, (low + high) / 2)] : [])], layout: layout(width, [], {
    height: Math.max(190, cell * R.length + 64 + (narrow ? 46 : 0)),
    margin: { l: 46, r: narrow ? 12 : 4, t: 10, b: 48 + (narrow ? 46 : 0) },
    xaxis: axis("tested on task", { range: [0.5, T + 0.5], constrain: "domain", showgrid: false, ...ticks(T, (j) => plain(names[j])),
      fixedrange: true }),
    yaxis: axis(R.length > 4 ? "after learning task" : "after", { range: [R.length + 0.5, 0.5], scaleanchor: "x",
      constrain: "domain", showgrid: false, ...ticks(R.length, (i) => plain(learnedName(learned, i, names))), fixedrange: true }),
  }) };
}

/** The values in the cells of a heat map, black or white by what lies below. */
function written(view, R, cell, middle) {
  const cells = R.flatMap((row, i) => row.map((value, j) => [value, i, j])).filter(([value]) => value !== null);
  return { type: "scatter", mode: "text", hoverinfo: "skip", showlegend: false,
    x: cells.map(([, , j]) => j + 1), y: cells.map(([, i]) => i + 1), text: cells.map(([value]) => scoreText(view, value, 2)),
    textfont: { size: cell >= 34 ? 12 : 9.5, color: cells.map(([value]) => (value > middle ? "#000" : "#fff")) } };
}

/** What was learned before row i of R, in short. */
function learnedName(learned, i, names) {
  return learned[i] === null || learned[i] === undefined ? "all" : names[learned[i]];
}

function ticks(n, name = (i) => String(i + 1)) {
  const step = n <= 10 ? 1 : n <= 20 ? 2 : Math.ceil(n / 10);
  const values = Array.from({ length: n }, (_, i) => i + 1).filter((i) => (i - 1) % step === 0 || n <= 10);
  return { tickvals: values, ticktext: values.map((i) => name(i - 1)), zeroline: false };
}

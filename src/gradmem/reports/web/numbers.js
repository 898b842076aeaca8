"use strict";
// From runs to numbers: which runs are chosen, their means and intervals. Nothing here draws.

/** Mean and half the width of the 95% interval (null for one value; NaN where one is not defined). */
function estimate(values, t) {
  const n = values.length;
  if (n === 0 || values.some((value) => value === null || value === undefined)) {
    return { mean: NaN, half: null };
  }
  const mean = values.reduce((sum, value) => sum + value, 0) / n;
  if (n === 1) return { mean, half: null };
  const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return { mean, half: t[n - 2] * Math.sqrt(squares / (n - 1) / n) };
}

/** The rows that have what was chosen, each with its chosen runs and their estimates. */
function select(data, chosen) {
  const words = wordsOf(chosen.find, data);
  const views = data.rows.map((row, index) => ({ ...row, index, runs: [] }));
  for (const run of data.runs) {
    if (chosen.seed.has(run.seed)) views[run.row].runs.push(run);
  }
  const kept = views.filter((view) => view.runs.length > 0 && chosen.benchmark.has(view.benchmark)
    && chosen.learner.has(view.learner) && words.every((has) => has(view)));
  for (const view of kept) {
    for (const key of ["acc", "bwt", "fwt", "seconds"]) {
      view[key] = estimate(view.runs.map((run) => run[key]), data.t);
    }
    view.seeds = view.runs.length;
  }
  return kept;
}

/** What is searched for, word by word: a whole name=value if some row has it, else any part of a row. */
function wordsOf(text, data) {
  return text.toLowerCase().split(/\s+/).filter(Boolean).map((word) =>
    (data.rows.some((row) => settingsOf(row).includes(word))
      ? (row) => settingsOf(row).includes(word) : (row) => described(row).includes(word)));
}

/** Everything about a row that can be searched for. */
function described(row) {
  return [row.benchmark, row.name, ...settingsOf(row)].join(" ").toLowerCase();
}

function settingsOf(row) {
  return Object.entries(row.settings).map(([name, value]) => `${name}=${value}`.toLowerCase());
}

/** At most `limit` rows, in their order: every learner's best ACC, then its second best, … */
function leading(rows, limit) {
  const acc = ({ acc: { mean } }) => (Number.isNaN(mean) ? -Number.MAX_VALUE : mean);
  const best = [...rows].sort((a, b) => acc(b) - acc(a));
  const seen = new Map();
  const rank = new Map();
  for (const row of best) {
    seen.set(row.learner, (seen.get(row.learner) || 0) + 1);
    rank.set(row, seen.get(row.learner));
  }
  const kept = new Set([...best].sort((a, b) => rank.get(a) - rank.get(b)).slice(0, limit));
  return rows.filter((row) => kept.has(row));
}

/**
 * The leading rows of a chart, each with its `place` among its learner's and a `label` that is no
 * longer than it takes to tell them apart.
 */
function drawnOf(rows, limit) {
  const drawn = leading(rows, limit);
  return drawn.map((row) => {
    const alike = drawn.filter((other) => other.base === row.base);
    const telling = Object.keys(row.settings).filter((name) => (row.conditions.includes(name) ? drawn : alike)
      .some((other) => other.settings[name] !== row.settings[name]));
    const details = telling.map((name) => `${name}=${row.settings[name]}`).join(", ");
    const place = drawn.filter((other) => other.learner === row.learner).indexOf(row);
    return { ...row, place, label: details ? `${row.base} (${details})` : row.base };
  });
}

/** The tasks' own names where they have short ones, else their numbers. `pictures/figure.py` does the same. */
function taskNames(labels, T) {
  const names = labels.map((label) => label.replace(/^task /, ""));
  const telling = names.length === T && new Set(names).size === T && names.every((name) => name.length <= 12)
    && !names.every((name) => /^\d+$/.test(name));
  return telling ? names : Array.from({ length: T }, (_, j) => String(j + 1));
}

/** The mean of matrices, cell by cell, over those that have the cell. */
function meanMatrix(matrices, unit) {
  const rows = Math.max(...matrices.map((matrix) => matrix.length));
  const columns = Math.max(...matrices.map((matrix) => matrix[0].length));
  return Array.from({ length: rows }, (_, i) => Array.from({ length: columns }, (_, j) => {
    const cells = matrices.map((matrix) => (matrix[i] || [])[j]).filter((cell) => cell !== undefined);
    return cells.length ? unit * cells.reduce((sum, cell) => sum + cell, 0) / cells.length : null;
  }));
}

/** R over a row's runs. With very many runs the page holds only the mean over all of its seeds. */
function matrixOf(view, runs) {
  return meanMatrix(runs[0].R ? runs.map((run) => run.R) : [view.R], view.unit);
}

/** A run's curves: for each task, scores after `run.examples` examples. */
function curvesOf(view, run) {
  if (!run.examples) return null;
  if (run.curve) return run.curve;
  const R = run.R || view.R;
  const baseline = run.R ? run.baseline : view.baseline;
  if (!baseline) return null;
  return baseline.map((value, task) => [value, ...R.map((row) => row[task])]);
}

/** The mean score on a task (null: on all tasks) over runs: [[examples, estimate], …]. */
function meanCurve(view, runs, task, data) {
  const found = new Map();
  for (const run of runs) {
    const curves = curvesOf(view, run);
    if (!curves || (task !== null && task >= curves.length)) continue;
    run.examples.forEach((examples, point) => {
      const value = task === null
        ? curves.reduce((sum, curve) => sum + curve[point], 0) / curves.length
        : curves[task][point];
      if (!found.has(examples)) found.set(examples, []);
      found.get(examples).push(value * view.unit);
    });
  }
  return [...found].sort((a, b) => a[0] - b[0])
    .map(([examples, values]) => [examples, estimate(values, data.t)]);
}

/** What can be said about projections: from the counts in a run to one number. */
const MEASURES = [
  { key: "violations", name: "violations per step",
    about: "Share of steps that would have raised the loss at a remembered task",
    of: (run) => run.violations / run.steps },
  { key: "violated", name: "violated constraints per step",
    about: "Tasks whose loss a step would have raised",
    of: (run) => run.violated_constraints / run.steps },
  { key: "active", name: "active constraints per projection",
    about: "Tasks that hold the projected step back",
    of: (run) => run.violations ? run.active_constraints / run.violations : null },
  { key: "solver", name: "solver steps per projection",
    about: "Iterations to find the projected step",
    of: (run) => run.violations ? run.solver_steps / run.violations : null },
];

/** Rows with projections, with an estimate for each measure over the `n` runs where it is defined. */
function diagnosed(views, data) {
  return views.filter((view) => view.runs.every((run) => run.steps && run.violations !== undefined))
    .map((view) => ({ ...view, measures: Object.fromEntries(MEASURES.map((measure) => {
      const values = view.runs.map(measure.of).filter((value) => value !== null);
      return [measure.key, { ...estimate(values, data.t), n: values.length }];
    })) }));
}

/** A number and its interval as text, as the tables on the terminal have them. */
function format({ mean, half }, digits, signed = false) {
  if (Number.isNaN(mean)) return "–";
  const text = fixed(mean, digits);
  const whole = signed && !text.startsWith("-") ? `+${text}` : text;
  return half === null ? whole : `${whole} ± ${fixed(half, digits)}`;
}

/** A number with so many digits after the point; null: with an exponent, as Python writes it. */
function fixed(value, digits) {
  const text = digits === null ? value.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2") : value.toFixed(digits);
  return text.replace(/^-(0\.?0*(e.*)?)$/, "$1"); // no minus before nothing
}

/** One score of a matrix: accuracies with `digits`, others with as many significant ones. */
function scoreText(view, value, digits) {
  return view.bounded ? value.toFixed(digits) : String(Number(value.toPrecision(digits + 1)));
}

"use strict";
// The page: what was chosen, by form or by address, and what is shown of it.

const DATA = JSON.parse(document.getElementById("data").textContent);
/** Lines or bars in one chart, and charts side by side, before there are too many to read. */
const LIMIT = 8;
const PANELS = 8;
/** What fits on a sheet of paper, in pixels. */
const PAPER = 660;
const FILTERS = ["benchmark", "learner", "seed"];

const known = {
  benchmark: [...new Set(DATA.rows.map((row) => row.benchmark))],
  learner: Object.keys(DATA.learners),
  seed: [...new Set(DATA.runs.map((run) => run.seed))].sort((a, b) => a - b || a.localeCompare(b)),
};
const state = { find: "", row: null, one: "", task: "0", measure: MEASURES[0].key, sort: "", down: false };
for (const name of FILTERS) state[name] = new Set(known[name]);

const $ = (selector) => document.querySelector(selector);

/** An element with text (never HTML: what runs are called is not ours to trust) and children. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// ---- the address: #learner=gem,ewc&seed=0 and so on; what it leaves out is not restricted

function readAddress() {
  const given = new Map();
  for (const part of location.hash.slice(1).split("&")) {
    const at = part.indexOf("=");
    if (at > 0) given.set(part.slice(0, at), part.slice(at + 1));
  }
  const text = (name, otherwise) => (given.has(name) ? decode(given.get(name)) : otherwise);
  for (const name of FILTERS) {
    const wanted = given.has(name) ? given.get(name).split(",").map(decode) : known[name];
    state[name] = new Set(known[name].filter((value) => wanted.includes(value)));
  }
  state.find = text("find", "");
  state.row = given.has("row") ? Number(text("row")) : null;
  state.one = text("one", "");
  state.task = text("task", "0");
  state.measure = MEASURES.some(({ key }) => key === text("measure")) ? text("measure") : MEASURES[0].key;
}

function decode(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

function writeAddress() {
  const parts = [];
  for (const name of FILTERS) {
    if (state[name].size < known[name].length) {
      parts.push(`${name}=${[...state[name]].map(encodeURIComponent).join(",")}`);
    }
  }
  if (state.find) parts.push(`find=${encodeURIComponent(state.find)}`);
  if (state.row !== null) parts.push(`row=${state.row}`);
  if (state.one) parts.push(`one=${encodeURIComponent(state.one)}`);
  if (state.task !== "0") parts.push(`task=${state.task}`);
  if (state.measure !== MEASURES[0].key) parts.push(`measure=${state.measure}`);
  history.replaceState(null, "", `${location.pathname}${location.search}${parts.length ? `#${parts.join("&")}` : ""}`);
}

// ---- the form

function buildForm() {
  for (const name of FILTERS) {
    const fieldset = $(`[data-filter="${name}"]`);
    const boxes = make("div");
    for (const value of known[name]) {
      const box = make("input", { type: "checkbox", name, value });
      const label = make("label", {}, box, ...(name === "learner" ? [key(value)] : []), make("span", {}, value));
      box.addEventListener("change", () => {
        state[name][box.checked ? "add" : "delete"](value);
        changed();
      });
      boxes.append(label);
    }
    for (const [text, values] of [["none", []], ["all", known[name]]]) {
      const button = make("button", { type: "button", class: "small", "aria-label": `${text} of the ${name}s` }, text);
      button.addEventListener("click", () => { state[name] = new Set(values); changed(); });
      if (known[name].length > 1) fieldset.querySelector("legend").append(button);
    }
    fieldset.append(boxes);
  }
  let waiting;
  $("#find").addEventListener("input", (event) => {
    state.find = event.target.value.trim();
    clearTimeout(waiting);
    waiting = setTimeout(changed, 200);
  });
  $("#filters form").addEventListener("submit", (event) => event.preventDefault());
  $("#filters form").addEventListener("reset", (event) => {
    event.preventDefault();
    for (const name of FILTERS) state[name] = new Set(known[name]);
    Object.assign(state, { find: "", row: null, one: "", task: "0" });
    changed();
  });
  for (const name of ["one", "task", "measure"]) {
    $(`#${name}`).addEventListener("change", (event) => { state[name] = event.target.value; changed(); });
  }
  $("#row").addEventListener("change", (event) => { state.row = Number(event.target.value); changed(); });
  for (const [id, step] of [["before", -1], ["after", 1]]) {
    $(`#${id}`).addEventListener("click", () => {
      const place = shown.findIndex((view) => view.index === state.row);
      state.row = shown[(place + step + shown.length) % shown.length].index;
      changed();
    });
  }
  for (const heading of document.querySelectorAll("[data-sort]")) {
    const button = make("button", { type: "button" }, heading.textContent);
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const name = heading.dataset.sort;
      state.down = state.sort === name ? !state.down : name !== "name" && name !== "seconds";
      state.sort = name;
      showTable(shown);
    });
  }
  for (const link of document.querySelectorAll("nav a")) {
    link.addEventListener("click", (event) => {
      event.preventDefault(); // the address keeps what was chosen
      const section = $(link.getAttribute("href"));
      section.setAttribute("tabindex", "-1");
      section.focus();
      section.scrollIntoView();
    });
  }
  if (window.matchMedia("(max-width: 900px)").matches) $("#filters").open = false;
}

/** The learner's mark, much as the charts have it. */
function key(learner) {
  const { colour, glyph } = DATA.learners[learner];
  return make("span", { class: "key", "aria-hidden": true, style: `color: ${colour}` }, glyph);
}

function showForm() {
  for (const box of document.querySelectorAll("#filters input[type=checkbox]")) {
    box.checked = state[box.name].has(box.value);
  }
  if ($("#find").value.trim() !== state.find) $("#find").value = state.find;
}

function options(select, entries, value) {
  select.replaceChildren(...entries.map(([own, text]) => make("option", { value: own }, text)));
  select.value = value;
}

// ---- what is shown

let shown = [];

function changed() {
  writeAddress();
  show();
}

function show() {
  shown = select(DATA, state);
  showForm();
  const runs = shown.reduce((sum, view) => sum + view.runs.length, 0);
  const all = DATA.runs.length;
  $("#count").textContent = runs === all ? `${all} run${all === 1 ? "" : "s"}` : `${runs} of ${all} runs`;
  $("#nothing").hidden = runs > 0;
  for (const section of document.querySelectorAll("main > section")) section.hidden = runs === 0;
  if (runs === 0) return;
  showShort(shown);
  showTable(shown);
  showBars(shown);
  showDetail(shown);
  showCurves(shown);
  showMemory(shown);
  showTime(shown);
  showDiagnostics(shown);
  for (const link of document.querySelectorAll("nav a")) link.hidden = $(link.getAttribute("href")).hidden;
}

function byBenchmark(rows) {
  const groups = new Map();
  for (const row of rows) groups.set(row.benchmark, [...(groups.get(row.benchmark) || []), row]);
  return groups;
}

/** One line for each benchmark: who is best, and who is next. */
function showShort(rows) {
  $("#short").replaceChildren(...[...byBenchmark(rows)].map(([benchmark, members]) => {
    const [first, second] = [...members].sort((a, b) => b.acc.mean - a.acc.mean);
    const best = make("li", {}, make("b", {}, benchmark), ": ");
    if (!second) {
      best.append(`${first.name} has ACC ${format(first.acc, first.digits)}.`);
    } else {
      best.append(`${first.name} has the highest ACC of ${members.length} rows, ${format(first.acc, first.digits)}; next `
        + `${second.name}, ${format(second.acc, second.digits)}.`);
    }
    return best;
  }));
}

function showTable(rows) {
  for (const heading of document.querySelectorAll("[data-sort]")) {
    if (heading.dataset.sort === state.sort) {
      heading.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    } else {
      heading.removeAttribute("aria-sort");
    }
  }
  const value = (row) => {
    const own = row[state.sort];
    return typeof own === "object" ? (Number.isNaN(own.mean) ? -Infinity : own.mean) : own;
  };
  const compare = (a, b) => (typeof value(a) === "string" ? value(a).localeCompare(value(b), undefined, { numeric: true }) : value(a) - value(b));
  const table = $("#table");
  for (const body of table.querySelectorAll("tbody")) body.remove();
  for (const [benchmark, members] of byBenchmark(rows)) {
    const sorted = state.sort ? [...members].sort((a, b) => (state.down ? -1 : 1) * compare(a, b)) : members;
    const top = Math.max(...members.map((row) => row.acc.mean));
    const body = make("tbody", {}, make("tr", {}, make("th", { scope: "rowgroup", colspan: 6 }, benchmark)));
    for (const row of sorted) {
      const button = make("button", { type: "button", class: "link", title: "Show its matrix R" }, ...named(row));
      button.addEventListener("click", () => {
        state.row = row.index;
        changed();
        $("#detail").scrollIntoView();
        $("#row").focus({ preventScroll: true });
      });
      body.append(make("tr", row.acc.mean === top && members.length > 1 ? { class: "best" } : {},
        make("th", { scope: "row" }, button), cell(format(row.acc, row.digits)), cell(format(row.bwt, row.digits, true)),
        cell(format(row.fwt, row.digits, true)), cell(format(row.seconds, 1)), make("td", {}, String(row.seeds))));
    }
    table.append(body);
  }
}

/** A row's name, what tells it from others of its kind in small letters. */
function named({ name, base }) {
  const details = name.startsWith(base) ? name.slice(base.length) : "";
  return details ? [base, make("small", {}, details)] : [name];
}

/** "0.865 ± 0.023" in two parts, which a narrow page puts under each other. */
function cell(text) {
  const [mean, half] = text.split(" ± ");
  const parts = [make("span", { class: "mean" }, mean)];
  if (half !== undefined) parts.push(" ", make("span", { class: "half" }, `± ${half}`));
  return make("td", {}, ...parts);
}

/** A chart for each benchmark in a section, drawn over the one that is there already. */
function panels(section, groups, draw) {
  const place = $(`#${section} .panels`);
  const entries = [...groups].slice(0, PANELS);
  const there = new Map([...place.children].map((figure) => [figure.dataset.benchmark, figure]));
  for (const [benchmark, figure] of there) {
    if (!entries.some(([name]) => name === benchmark)) {
      Plotly.purge(figure.querySelector(".plot"));
      figure.remove();
    }
  }
  for (const [benchmark] of entries) {
    let figure = there.get(benchmark);
    if (!figure) {
      figure = make("figure", { "data-benchmark": benchmark }, make("figcaption", {}, benchmark),
        make("div", { class: "plot", role: "img" }));
    }
    place.append(figure);
  }
  for (const [benchmark, members] of entries) {
    const figure = [...place.children].find((one) => one.dataset.benchmark === benchmark);
    const plot = figure.querySelector(".plot");
    const chart = draw(members, plot.clientWidth);
    plot.setAttribute("aria-label", chart.label);
    Plotly.react(plot, chart.traces, chart.layout, CONFIG);
    if (chart.numbers) numbersBelow(figure, chart.numbers, `${chart.label}, as a table`);
  }
}

function numbersBelow(figure, { headings, rows }, label) {
  let details = figure.querySelector("details");
  if (!details) {
    details = make("details", {}, make("summary", {}, "The numbers"),
      make("div", { class: "scroll", tabindex: 0, role: "region" }, make("table", { class: "numbers" })));
    figure.append(details);
  }
  details.querySelector("div").setAttribute("aria-label", label);
  fillTable(details.querySelector("table"), headings, rows);
}

function fillTable(table, headings, rows) {
  table.replaceChildren(
    make("thead", {}, make("tr", {}, ...headings.map((text) => make("th", { scope: "col" }, text)))),
    make("tbody", {}, ...rows.map(([first, ...others]) => make("tr", {}, make("th", { scope: "row" }, first),
      ...others.map((text) => make("td", {}, text))))));
}

/** Say so where a section shows some rows of many; all of them, if `all`. */
function limited(section, groups, all = false) {
  const most = all ? 0 : Math.max(...[...groups.values()].map((members) => members.length));
  const left = groups.size - PANELS;
  const text = [];
  if (most > LIMIT) {
    text.push(`Of up to ${most} rows a benchmark, ${LIMIT} are drawn: every learner’s best. Choose fewer to see others.`);
  }
  if (left > 0) text.push(`${left} more benchmarks are not drawn.`);
  $(`#${section} .limit`).textContent = text.join(" ");
}

function showBars(rows) {
  const groups = byBenchmark(rows);
  limited("bars", groups);
  const metrics = [
    { key: "acc", name: "ACC", signed: false }, { key: "bwt", name: "BWT", signed: true },
    { key: "fwt", name: "FWT", signed: true },
  ].map((metric) => ({ ...metric, label: metric.name, of: (row) => row[metric.key],
    published: (row) => (row.published ? row.published[metric.key] : undefined) }));
  let published = false;
  panels("bars", groups, (members, width) => {
    const drawn = drawnOf(members, LIMIT);
    published ||= drawn.some((row) => row.published);
    return {
      ...barChart(drawn, metrics, DATA, width),
      label: `Bars of ACC, BWT and FWT on ${members[0].benchmark}; the summary table has the values`,
    };
  });
  $("#published").hidden = !published;
}

function showDetail(rows) {
  if (!rows.some((view) => view.index === state.row)) {
    // The best row is the one to look at first; on test sets, if there are any.
    const tested = rows.filter((view) => !view.settings.held_out);
    state.row = (tested.length ? tested : rows)
      .reduce((best, view) => (view.acc.mean > best.acc.mean ? view : best)).index;
  }
  const view = rows.find((one) => one.index === state.row);
  $("#row").replaceChildren(...[...byBenchmark(rows)].map(([benchmark, members]) => {
    const group = make("optgroup", { label: benchmark });
    group.append(...members.map((one) => make("option", { value: one.index }, `${one.name}: ACC ${fixed(one.acc.mean, one.digits)}`)));
    return group;
  }));
  $("#row").value = state.row;
  for (const id of ["before", "after"]) $(`#${id}`).disabled = rows.length < 2;
  const held = Boolean(view.runs[0].R);
  const seeds = held ? view.runs.map((run) => run.seed) : [];
  if (!seeds.includes(state.one)) state.one = "";
  const whole = view.runs.length === 1 ? seedName(view.runs[0].seed) : `mean of ${view.runs.length}`;
  options($("#one"), [["", whole], ...(seeds.length > 1 ? seeds.map((seed) => [seed, seedName(seed)]) : [])], state.one);

  const runs = state.one ? view.runs.filter((run) => run.seed === state.one) : view.runs;
  const R = matrixOf(view, runs);
  // Tasks may be others for each seed: only what all runs on show have in common is named.
  const common = (name) => (runs.every((run) => JSON.stringify(run[name]) === JSON.stringify(runs[0][name]))
    ? runs[0][name] : null);
  const tasks = common("tasks") || [];
  const learned = common("learned") || R.map((_, i) => i);
  const which = held ? (runs.length === 1 ? seedName(runs[0].seed) : `mean of ${runs.length} seeds`)
    : "mean of all seeds (there are too many runs for a matrix each)";
  $("#matrix-caption").textContent = `R of ${view.name} on ${view.benchmark}, ${which}: `
    + `ACC ${format(estimate(runs.map((run) => run.acc), DATA.t), view.digits)}`;
  const map = heatMap(view, R, learned, tasks, $("#matrix").clientWidth);
  draw($("#matrix"), map);
  const T = R[0].length;
  const names = taskNames(tasks, T);
  fillTable($("#matrix-table"), ["after \\ on", ...names],
    R.map((row, i) => [learnedName(learned, i, names), ...row.map((value) => (value === null ? "–" : scoreText(view, value, 4)))]));
  const curves = R[0].map((_, task) => meanCurve(view, runs, task, DATA));
  $("#tasks-caption").textContent = T > 1 ? `Its ${T} tasks as they are learned, the first one darkest` : "Its task as it is learned";
  draw($("#tasks"), taskChart(view, curves, tasks, $("#tasks").clientWidth, map.layout.height));
  $("#settings").replaceChildren(...Object.entries({ benchmark: view.benchmark, learner: view.learner, ...view.settings })
    .flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

/** "seed 3"; "run 1" where the seed is not known. */
function seedName(seed) {
  return seed.startsWith("run ") ? seed : `seed ${seed}`;
}

function draw(plot, chart) {
  Plotly.react(plot, chart.traces, chart.layout, CONFIG);
}

/** The tasks' names, where all runs on show have the same. */
function namesOf(rows, T) {
  const runs = rows.flatMap((view) => view.runs);
  const alike = runs.every((run) => JSON.stringify(run.tasks) === JSON.stringify(runs[0].tasks));
  return taskNames(alike ? runs[0].tasks : [], T);
}

function showCurves(rows) {
  const T = Math.max(...rows.flatMap((view) => view.runs.map((run) => (run.R || view.R)[0].length)));
  if (state.task !== "all" && !(Number(state.task) < T)) state.task = "0";
  const names = namesOf(rows, T);
  const own = (j) => (names[j] === String(j + 1) ? "" : ` (${names[j]})`);
  options($("#task"), [...Array.from({ length: T }, (_, j) => [String(j), `${j ? `task ${j + 1}` : "the first task"}${own(j)}`]),
    ["all", "all tasks, their mean"]], state.task);
  const task = state.task === "all" ? null : Number(state.task);
  const where = task === null ? "on all tasks" : `on task ${names[task]}`;
  const groups = byBenchmark(rows.filter((view) => view.runs.some((run) => run.examples)));
  limited("curves", groups);
  panels("curves", groups, (members, width) => {
    const curves = drawnOf(members, LIMIT).map((row) => ({ row, points: meanCurve(row, row.runs, task, DATA) }))
      .filter(({ points }) => points.length > 0);
    const examples = [...new Set(curves.flatMap(({ points }) => points.map(([x]) => x)))].sort((a, b) => a - b);
    const maps = curves.map(({ points }) => new Map(points));
    const title = `${task === null ? "mean " : ""}${members[0].score} ${where}`;
    return {
      ...curveChart(curves, plain(title, 60), DATA, width),
      label: `${title} over examples observed on ${members[0].benchmark}`,
      numbers: { headings: ["examples", ...curves.map(({ row }) => row.label)],
        rows: examples.map((x) => [x.toLocaleString("en"),
          ...maps.map((points, i) => (points.has(x) ? format(points.get(x), curves[i].row.digits) : "–"))]) },
    };
  });
}

function showMemory(rows) {
  const lines = new Map();
  for (const row of rows) {
    if (row.line !== null) lines.set(row.line, [...(lines.get(row.line) || []), row]);
  }
  const found = [...lines].map(([line, members]) => ({ name: DATA.lines[line], benchmark: members[0].benchmark,
    learner: members[0].learner, base: members[0].base, acc: { mean: Math.max(...members.map((row) => row.acc.mean)) },
    rows: members.sort((a, b) => a.memory - b.memory) }))
    .filter(({ rows: members }) => new Set(members.map((row) => row.memory)).size > 1);
  const groups = byBenchmark(found);
  const most = Math.max(0, ...[...groups.values()].map((members) => members.length));
  $("#memory").hidden = found.length === 0;
  $("#memory .about").textContent = `Learners with different memories, all else equal.${most > LIMIT
      ? ` Of up to ${most} lines a benchmark, ${LIMIT} are drawn: every learner’s best.` : ""}${groups.size > PANELS
      ? ` ${groups.size - PANELS} more benchmarks are not drawn.` : ""}`;
  panels("memory", groups, (members, width) => {
    const drawn = leading(members, LIMIT);
    return {
      ...memoryChart(drawn, DATA, width),
      label: `ACC against examples remembered on ${members[0].benchmark}`,
      numbers: { headings: ["learner", "remembered", "ACC"],
        rows: drawn.flatMap((line) => line.rows.map((row) =>
          [line.name, row.memory.toLocaleString("en"), format(row.acc, row.digits)])) },
    };
  });
}

function showTime(rows) {
  const groups = byBenchmark(rows.filter((row) => !Number.isNaN(row.seconds.mean)));
  limited("time", groups, true);
  panels("time", groups, (members, width) => ({
    ...timeChart(drawnOf(members, Infinity), DATA, width),
    label: `ACC against seconds on ${members[0].benchmark}; the summary table has the values`,
  }));
}

function showDiagnostics(rows) {
  const found = diagnosed(rows, DATA);
  $("#diagnostics").hidden = found.length === 0;
  if (found.length === 0) return;
  options($("#measure"), MEASURES.map(({ key: own, name }) => [own, name]), state.measure);
  const measure = MEASURES.find(({ key: own }) => own === state.measure);
  $("#measure-about").textContent = `${measure.about}.`;
  const groups = byBenchmark(found);
  limited("diagnostics", groups);
  panels("diagnostics", groups, (members, width) => ({
    ...barChart(drawnOf(members, LIMIT), [{ name: measure.name, label: "", digits: 3,
      signed: false, of: (row) => row.measures[measure.key] }], DATA, width),
    label: `${measure.name} on ${members[0].benchmark}; the table below has the values`,
  }));
  fillTable($("#diagnostics-table"), ["learner", ...MEASURES.map(({ name }) => name)], found.map((row) =>
    [groups.size > 1 ? `${row.benchmark}, ${row.name}` : row.name,
      ...MEASURES.map(({ key: own }) => format(row.measures[own], 3) + some(row.measures[own], row))]));
}

// ---- begin

buildForm();
readAddress();
show();
window.addEventListener("hashchange", () => {
  // A link to a section (#curves) is not a choice.
  if (location.hash.includes("=")) { readAddress(); show(); }
});
let resized;
window.addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => { if (window.innerWidth !== width) { width = window.innerWidth; show(); } }, 150);
});
let width = window.innerWidth;
window.addEventListener("beforeprint", () => {
  for (const plot of document.querySelectorAll(".plot")) {
    if (plot.data && plot.clientWidth > PAPER) Plotly.relayout(plot, { width: PAPER });
  }
});
window.addEventListener("afterprint", show);
document.documentElement.dataset.ready = "yes";

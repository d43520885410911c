// Tables: the values of a chart, and the points themselves.

import { content, head, isSetting, label, named, results, settings, shown, text, value } from "explorer/data";
import { byId, el, opener, table } from "explorer/dom";
import { facets } from "explorer/filters";
import { grouped, seriesOf } from "explorer/groups";

const PAGE = 50;
const USUAL = ["method", "workload", "model", "mode", "status", "gpus", "seqlen", "cluster", "phase", "step_ms_median", "mfu", "comm_bytes_per_gpu", "peak_mem_bytes_max"];
const all = ["method", ...[...settings, ...results].map((field) => field.name).filter((name) => name !== "method")];
const state = { shown: PAGE, sort: "", down: false, columns: new Set() };
for (const name of USUAL) if (isSetting(name) ? facets.some((f) => f.name === name) || name === "method" : all.includes(name)) state.columns.add(name);

/** The values of a chart as a table: a row for each place of the axis, a column for each series. */
export function pivot(rows, asked, open) {
  const names = [...new Set([...(asked.split ? [asked.split] : []), asked.x])];
  const order = (name, each) => content.settings[name].values.indexOf(each);
  const bySeries = [...grouped(rows, [asked.series, "mode"]).values()].sort((a, b) => order(asked.series, a.values[asked.series]) - order(asked.series, b.values[asked.series]) || order("mode", a.values.mode) - order("mode", b.values.mode));
  const series = bySeries.map((each) => seriesOf(asked.series, each.rows[0]));
  const places = [...grouped(rows, names).values()].sort((a, b) => names.map((n) => order(n, a.values[n]) - order(n, b.values[n])).find((d) => d) ?? 0);
  const lines = places.map((place) => [
    ...names.map((name) => shown(name, place.values[name])),
    ...series.map((each) => cell(place.rows.filter((i) => seriesOf(asked.series, i) === each), asked.y, open)),
  ]);
  const heads = [...names.map((name) => ({ text: label(name) })), ...series.map((each) => ({ text: each, number: true }))];
  return table(`${head(asked.y)} by ${names.map(label).join(" and ")}`, heads, lines);
}

function cell(rows, name, open) {
  const known = rows.filter((i) => value(name, i) != null).sort((a, b) => value(name, a) - value(name, b));
  if (!known.length) return "–";
  if (known.length === 1) return opener(text(name, known[0]), known[0], open);
  return el("span", { title: `${known.length} points that differ in other settings` },
    opener(text(name, known[0]), known[0], open), " to ", opener(text(name, known.at(-1)), known.at(-1), open), ` (${known.length} points)`);
}

/** Show the first points in a table that is sorted by a click on a head. */
export function showPoints(rows, open) {
  const columns = all.filter((name) => state.columns.has(name));
  const sorted = state.sort ? [...rows].sort(bySort) : rows;
  const headOf = (name) => el("button", { type: "button", click: () => { sortBy(name); showPoints(rows, open); } }, isSetting(name) ? label(name) : head(name));
  const made = table("Points", columns.map((name) => ({ text: headOf(name), number: !isSetting(name) })), sorted.slice(0, state.shown).map((i) =>
    columns.map((name) => (name === "method" ? opener(named(i), i, open) : text(name, i)))));
  columns.forEach((name, k) => {
    if (name === state.sort) made.tHead.rows[0].cells[k].setAttribute("aria-sort", state.down ? "descending" : "ascending");
  });
  byId("points").replaceChildren(made);
  byId("more").hidden = rows.length <= state.shown;
  byId("more").textContent = `Show ${Math.min(PAGE, rows.length - state.shown)} more of ${rows.length}`;
  byId("more").onclick = () => { state.shown += PAGE; showPoints(rows, open); };
  byId("csv").onclick = () => save(sorted);
}

function sortBy(name) {
  state.down = state.sort === name && !state.down;
  state.sort = name;
}

function bySort(a, b) {
  const [x, y] = isSetting(state.sort)
    ? [content.settings[state.sort].codes[a], content.settings[state.sort].codes[b]]
    : [content.results[state.sort][a], content.results[state.sort][b]];
  if (x == null || y == null) return (x == null) - (y == null);
  return state.down ? y - x : x - y;
}

/** Checkboxes that choose the columns. */
export function chooseColumns(changed) {
  byId("columns").lastElementChild.replaceChildren(...all.filter((name) => name !== "method").map((name) => {
    const box = el("input", { type: "checkbox", checked: state.columns.has(name), change: () => {
      if (box.checked) state.columns.add(name);
      else state.columns.delete(name);
      changed();
    } });
    return el("label", {}, box, isSetting(name) ? label(name) : head(name));
  }));
}

/** Back to the first page, as the points have changed. */
export const fromStart = () => { state.shown = PAGE; };

/** All settings and results of the points, with intervals, as a CSV file. */
function save(rows) {
  const quote = (each) => (each == null ? "" : /[",\n]/.test(each) ? `"${String(each).replaceAll('"', '""')}"` : String(each));
  const ends = Object.keys(content.low).filter((name) => name in content.results);
  const heads = ["run_id", ...all.map((name) => (isSetting(name) ? label(name) : head(name))), ...ends.flatMap((name) => [`${head(name)} low`, `${head(name)} high`])];
  const lines = rows.map((i) => [content.id[i], ...all.map((name) => value(name, i)), ...ends.flatMap((name) => [content.low[name][i], content.high[name][i]])]);
  const file = new Blob([[heads, ...lines].map((line) => line.map(quote).join(",")).join("\n")], { type: "text/csv" });
  const link = el("a", { href: URL.createObjectURL(file), download: "points.csv" });
  link.click();
  URL.revokeObjectURL(link.href);
}

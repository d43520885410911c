// The chart's view: its controls, the chart, and what its points differ in.

import { bars, draw, heat, lines } from "explorer/charts";
import { content, head, interval, isSetting, label, results, settings, shown, value } from "explorer/data";
import { byId, el, options } from "explorer/dom";
import { facets } from "explorer/filters";
import { listed, others } from "explorer/groups";
import { pivot } from "explorer/tables";

const KINDS = { line: lines, bar: bars, heat };
const form = byId("controls");
const several = (name) => facets.some((field) => field.name === name);
const axes = [...facets, ...settings.filter((field) => ["method", "gpus", "seqlen"].includes(field.name) && !several(field.name))].filter((field) => field.name !== "status");

/** What the controls show at first: the setting with most numbers along the axis. */
export function usual() {
  const numbers = ["gpus", "seqlen", "heads", "kv_heads", "head_dim", "batch"].filter(several);
  const x = numbers.sort((a, b) => content.settings[b].values.length - content.settings[a].values.length)[0] ?? "gpus";
  const series = several("method") || !facets.length ? "method" : (facets.find((field) => field.name !== x)?.name ?? "method");
  return { type: "line", y: results[0]?.name ?? "", x, series, split: "", which: "lowest", log: true };
}

/** What of a choice in an address these records have. */
export function known(asked) {
  const axis = (name) => axes.some((field) => field.name === name);
  const allowed = { type: (each) => each in KINDS, y: (each) => results.some((field) => field.name === each), x: axis, series: axis,
    split: (each) => each === "" || axis(each), which: (each) => ["lowest", "middle", "highest"].includes(each), log: () => true };
  return Object.fromEntries(Object.entries(asked).filter(([name, each]) => allowed[name]?.(each)));
}

/** A chart for each of the few values of a setting by which lines would otherwise be mixed; "" where none is. */
export function usualSplit(rows, asked) {
  const count = (name) => content.settings[name].values.length;
  const few = others(rows, ["mode", asked.series, asked.x]).filter((name) => count(name) <= 6 && axes.some((field) => field.name === name));
  return few.sort((a, b) => count(b) - count(a))[0] ?? "";
}

/** Fill the controls; `changed` is called with the new choice. */
export function setUp(asked, changed) {
  options(form.elements.y, results.map((field) => [field.name, head(field.name)]));
  for (const name of ["x", "series"]) options(form.elements[name], axes.map((field) => [field.name, field.label]));
  options(form.elements.split, [["", "none"], ...axes.map((field) => [field.name, field.label])]);
  show(asked);
  form.addEventListener("change", () => changed(read()));
  form.addEventListener("submit", (event) => event.preventDefault());
}

function read() {
  const elements = form.elements;
  const found = Object.fromEntries(["type", "y", "x", "series", "split", "which"].map((name) => [name, elements[name].value]));
  return { ...found, log: elements.log.checked };
}

/** Show a choice in the controls. */
export function show(asked) {
  for (const [name, each] of Object.entries(asked)) {
    if (name === "log") form.elements.log.checked = each;
    else form.elements[name].value = each;
  }
  byId("series-label").textContent = asked.type === "heat" ? "Down" : "Colour by";
  for (const each of form.querySelectorAll("[data-for]")) each.hidden = !each.dataset.for.split(" ").includes(asked.type);
}

let turn = 0;

/** Draw the chart of some records, and the table of its values. */
export async function render(rows, asked, open, change) {
  const mine = ++turn;
  const without = rows.filter((i) => value(asked.y, i) == null);
  const element = byId("chart");
  const fits = asked.split === asked.x || asked.split === asked.series ? { ...asked, split: "" } : asked;
  const made = KINDS[asked.type](rows, fits, element.clientWidth || 600);
  if (!made.drawn.length) {
    element.replaceChildren(el("p", {}, rows.length ? `None of these points has a ${label(asked.y)}.` : "No point passes the filters."));
    byId("differences").replaceChildren();
  } else {
    byId("differences").replaceChildren(...differences(made, fits, change));
    const name = `${label(asked.y)} by ${label(asked.x)} and ${label(asked.series)}, ${made.drawn.length} points`;
    await draw(element, made.spec, name, open);
    if (mine !== turn) return;
  }
  byId("caption").textContent = caption(made, asked, without);
  byId("values").lastElementChild.replaceChildren(pivot(made.drawn, fits, open));
}

function caption(made, asked, without) {
  const failed = new Map();
  for (const i of without) failed.set(value("status", i), (failed.get(value("status", i)) ?? 0) + 1);
  const modes = new Set(made.drawn.map((i) => value("mode", i)));
  const words = [[...modes].map((mode) => content.kinds[mode]).join("; ").replace(/^./, (letter) => letter.toUpperCase())];
  const barred = new Set(asked.type === "heat" ? [] : made.drawn.filter((i) => interval(asked.y, i)).map((i) => value("mode", i)));
  if ([...barred].some((mode) => mode !== "simulated")) words.push("vertical bars of measured points are 95% intervals");
  if (barred.has("simulated")) words.push("vertical bars of simulated points are what two of three measurements like them are within");
  if (asked.y === "comm_bytes_per_gpu" && asked.type !== "heat") words.push("black marks are lower bounds: solid with the same split of heads, dashed with any");
  if (without.length) words.push(`without a value: ${[...failed].map(([status, n]) => `${n} ${status}`).join(", ")}`);
  words.push("a click on a mark, or a value below, opens the point");
  return `${words.filter(Boolean).join(". ").replace(/\. ([a-z])/g, (_, letter) => `. ${letter.toUpperCase()}`)}.`;
}

/** What points of one series differ in beside the axes, and what can be done about it. */
function differences(made, asked, change) {
  if (!made.rest.length) return [];
  const what = asked.type === "line" ? "Lines of one colour differ in" : "Points of one place differ in";
  const how = asked.type === "line" ? "" : ` The chart shows the ${asked.which} of them.`;
  const buttons = made.rest.slice(0, 3).flatMap((name) => {
    const most = mostCommon(name, made.drawn);
    return [
      asked.split ? null : el("button", { type: "button", click: () => change({ split: name }) }, `A chart for each ${label(name)}`),
      isSetting(name) ? el("button", { type: "button", click: () => change({ keep: [name, most] }) }, `Only ${label(name)} ${shown(name, most)}`) : null,
    ];
  });
  return [el("div", {}, `${what} ${listed(made.rest)}.${how}`), el("div", {}, ...buttons)];
}

function mostCommon(name, rows) {
  const counts = new Map();
  for (const i of rows) counts.set(value(name, i), (counts.get(value(name, i)) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1])[0][0];
}

// The comparison's view: two selections, their pairs, and verdicts with intervals.

import { draw, ratios } from "explorer/charts";
import { FOLLOW, FREE, paired, ratioOf } from "explorer/compare";
import { content, described, head, label, number, results, shown, text, value } from "explorer/data";
import { byId, el, opener, options, table } from "explorer/dom";
import { facets, inWords } from "explorer/filters";
import { listed } from "explorer/groups";

const MOST_DRAWN = 40;
const form = byId("pick");
const UNITS = { gpus: "GPUs", seqlen: "tokens", heads: "query heads", kv_heads: "KV heads", head_dim: "head dimension", batch: "batch", documents: "documents" };
const several = (name) => facets.some((field) => field.name === name);
const sides = { a: null, b: null };

/** Fill the controls; `current` gives the present filter, `changed` is called when A or B changes. */
export function setUp(current, changed) {
  const fields = facets.filter((field) => field.name !== "status" && field.name !== "mode");
  options(form.elements.field, fields.map((field) => [field.name, field.label]), facets.some((f) => f.name === "method") ? "method" : undefined);
  options(form.elements.result, results.map((field) => [field.name, head(field.name)]));
  const pick = () => {
    const name = form.elements.field.value;
    for (const side of ["a", "b"]) sides[side] = name ? limited(current(), name, form.elements[side].value) : current();
    changed();
  };
  const refill = () => {
    const name = form.elements.field.value;
    const pairs = name ? content.settings[name].values.map((each, k) => [k, shown(name, each)]) : [];
    options(form.elements.a, pairs, 0);
    options(form.elements.b, pairs, pairs.length - 1);
    pick();
  };
  form.elements.field.addEventListener("change", refill);
  form.elements.result.addEventListener("change", changed);
  for (const side of ["a", "b"]) {
    form.elements[side].addEventListener("change", pick);
    byId(`set-${side}`).addEventListener("click", () => { sides[side] = structuredClone(current()); changed(); });
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  refill();
}

function limited(filter, name, code) {
  const found = structuredClone(filter);
  found.chosen[name] = [content.settings[name].values[Number(code)]];
  return found;
}

/** Show the pairs of A and B. */
export async function render(open) {
  for (const side of ["a", "b"]) byId(`side-${side}`).textContent = inWords(sides[side]);
  const name = form.elements.result.value;
  const found = paired(sides.a, sides.b);
  const pairs = found.pairs.filter(([a, b]) => value(name, a) && value(name, b)).map(([a, b]) => ({ a, b, ...ratioOf(name, a, b) }));
  pairs.sort((x, y) => x.ratio - y.ratio);
  for (const pair of pairs) {
    const ends = pair.low == null ? "no interval" : pair.low === pair.high ? "" : `${number(pair.low)}, ${number(pair.high)}`;
    pair.shown = number(pair.ratio) + (ends ? ` [${ends}]` : "");
    pair.name = `${common(pair.a, found.differ)} (${value("mode", pair.a)})`;
  }
  byId("outcome").textContent = outcome(found, pairs, name);
  byId("pairs").replaceChildren(...(pairs.length ? [listing(pairs, name, open)] : []));
  byId("ratios-caption").textContent = pairs.length ? caption(pairs) : "";
  const element = byId("ratios");
  if (!pairs.length) return element.replaceChildren();
  const several = new Map();
  const drawn = pairs.slice(0, MOST_DRAWN).map((pair) => {
    const seen = (several.get(pair.name) ?? 0) + 1;
    several.set(pair.name, seen);
    return seen > 1 ? { ...pair, name: `${pair.name}, ${seen}` } : pair;
  });
  return draw(element, ratios(drawn, element.clientWidth || 600), `Ratios B / A of ${label(name)}`);
}

/** What both points of a pair share of what points here differ in. */
function common(i, differ) {
  const names = ["gpus", "seqlen", ...facets.map((field) => field.name)].filter((name, k, all) => all.indexOf(name) === k);
  const told = names.filter((name) => several(name) && !FREE.includes(name) && !differ.some((one) => one === name || FOLLOW[one]?.includes(name)));
  const words = told.filter((name) => name !== "mode" && value(name, i) != null).map((name) =>
    (UNITS[name] === undefined ? shown(name, value(name, i)) : `${shown(name, value(name, i))} ${UNITS[name]}`));
  return words.join(", ") || described(i);
}

function outcome(found, pairs, name) {
  if (found.problem) return found.problem;
  const counts = new Map();
  for (const pair of pairs) counts.set(pair.verdict, (counts.get(pair.verdict) ?? 0) + 1);
  const words = [...counts].map(([verdict, n]) => `${n} ${verdict}`).join(", ");
  const rest = [`B against A by ${label(name)}, ${pairs.length} pairs: ${words || "none has both values"}.`];
  if (found.differ.length) rest.push(`Pairs differ in ${listed(found.differ)}.`);
  const [a, b] = found.alone;
  if (a || b) rest.push(`Without their like: ${a} of A, ${b} of B.`);
  if (found.older) rest.push(`${found.older} older records of the same points are left out.`);
  return rest.join(" ");
}

function caption(pairs) {
  const [measured, noisy] = [pairs.some((pair) => value("mode", pair.a) !== "simulated"), pairs.some((pair) => pair.low !== pair.high || pair.low == null)];
  const far = "The interval of a ratio reaches between the far ends of both intervals, so points whose intervals overlap are AMBIGUOUS and are not ranked; below 2% is SAME.";
  const words = measured
    ? `${far} python -m analysis.compare resamples iterations in pairs and can tell more apart.`
    : noisy
      ? `${far} The interval of a simulated time is what two of three measurements like it are within (python -m sp_bench.validate published); one that is not validated has none, and is not ranked.`
      : "Counted bytes, and times that different code simulates for the same point, have no noise: ratios have no interval.";
  return pairs.length > MOST_DRAWN ? `The first ${MOST_DRAWN} of ${pairs.length} pairs are drawn. ${words}` : words;
}

function listing(pairs, name, open) {
  const heads = [{ text: "point" }, { text: "A", number: true }, { text: "B", number: true }, { text: "B / A", number: true }, { text: "verdict" }];
  return table(head(name), heads, pairs.map((pair) => [
    pair.name, opener(text(name, pair.a), pair.a, open), opener(text(name, pair.b), pair.b, open), pair.shown, el("span", { class: pair.verdict }, pair.verdict),
  ]));
}

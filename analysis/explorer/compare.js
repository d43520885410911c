// Two selections, point by point. Ratios are B / A, and verdicts those of analysis.verdict.

import { content, interval, result, settings, value } from "explorer/data";
import { filtered } from "explorer/filters";
import { keyOf } from "explorer/groups";

/** The difference that counts as none, for numbers with noise and without. */
export const SAME = { noisy: 0.02, exact: 1e-9 };

/** Settings that never pair points: what came out, and which code computed it. */
export const FREE = ["status", "bound_by", "code", "device_name", "nodes", "variant", "layout"];
/** Settings that needn't agree where points differ in these. */
export const FOLLOW = {
  method: ["impl", "kernel", "method_options"],
  cluster: ["kernel", "cluster_options"],
  variant: ["method_options"],
  layout: ["method_options"],
};

/**
 * The verdict on B / A: SAME, FASTER (LESS), SLOWER (MORE) or AMBIGUOUS. `better` is less, more or "", and `low` and
 * `high` the ratio's interval; null for none.
 */
export function verdict({ ratio, low, high }, same, better) {
  if (low == null || high == null) return "AMBIGUOUS";
  const [below, above] = [Math.min(low, ratio), Math.max(high, ratio)];
  if (1 / (1 + same) <= below && above <= 1 + same) return "SAME";
  const words = { less: ["FASTER", "SLOWER"], more: ["SLOWER", "FASTER"] }[better] ?? ["LESS", "MORE"];
  if (above < 1 && ratio < 1 / (1 + same)) return words[0];
  if (below > 1 && ratio > 1 + same) return words[1];
  return "AMBIGUOUS";
}

/** B / A of one result of records a and b, with the interval between the far ends of theirs, and the verdict. */
export function ratioOf(name, a, b) {
  const field = result(name);
  const [x, y] = [value(name, a), value(name, b)];
  const noisy = field.noisy && (value("mode", a) !== "simulated" || (name in content.low && !isAlike(a, b)));
  const ratio = x === y ? 1 : y / x;
  let [low, high] = [ratio, ratio];
  if (noisy) {
    const [ofA, ofB] = [interval(name, a), interval(name, b)];
    [low, high] = ofA && ofB ? [ofB[0] / ofA[1], ofB[1] / ofA[0]] : [null, null];
  }
  const better = field.noisy ? field.better : "";
  return { ratio, low, high, verdict: verdict({ ratio, low, high }, noisy ? SAME.noisy : SAME.exact, better) };
}

/** Whether two records are of one request. Simulated by different code, they are off a measurement alike. */
const isAlike = (a, b) => settings.every(({ name }) => FREE.includes(name) || value(name, a) === value(name, b));

/**
 * The points of two filters in pairs: those that agree in everything but what the filters themselves choose
 * differently. {pairs: [[a, b], ...], differ, alone: [of A, of B], older, problem}
 */
export function paired(filterA, filterB) {
  const [rowsA, rowsB] = [filtered(filterA).rows, filtered(filterB).rows];
  const names = new Set([...Object.keys(filterA.chosen), ...Object.keys(filterB.chosen)]);
  const differ = [...names].filter((n) => String(filterA.chosen[n] ?? "") !== String(filterB.chosen[n] ?? ""));
  const none = { pairs: [], differ, alone: [rowsA.length, rowsB.length], older: 0 };
  if (!rowsA.length || !rowsB.length) return { ...none, problem: `${rowsA.length ? "B" : "A"} has no points.` };
  const modes = [rowsA, rowsB].map((rows) => new Set(rows.map((i) => value("mode", i))));
  if (![...modes[0]].some((mode) => modes[1].has(mode))) {
    const kinds = modes.map((set) => [...set].join(" and "));
    return { ...none, problem: `A is ${kinds[0]} and B is ${kinds[1]}: they are never compared here. ` +
      "python -m sp_bench.validate compares simulated with measured times." };
  }
  const free = new Set([...FREE, ...differ, ...differ.flatMap((name) => FOLLOW[name] ?? [])]);
  const keys = settings.map((field) => field.name).filter((name) => name === "mode" || !free.has(name));
  const [a, b] = [newest(rowsA, keys), newest(rowsB, keys)];
  const pairs = [...a.byKey].filter(([key]) => b.byKey.has(key)).map(([key, i]) => [i, b.byKey.get(key)]);
  const problem = pairs.length ? "" : "No point of A has its like in B: they differ in more than what was chosen.";
  const alone = [a.byKey.size - pairs.length, b.byKey.size - pairs.length];
  return { pairs: pairs.filter(([i, j]) => i !== j), differ, alone, older: a.older + b.older, problem };
}

/** The record of each point by its settings; of several, the one that was written last. */
function newest(rows, keys) {
  const byKey = new Map();
  let older = 0;
  for (const i of rows) {
    const key = keyOf(keys, i);
    const before = byKey.get(key);
    if (before !== undefined) older++;
    if (before === undefined || content.written[i] >= content.written[before]) byKey.set(key, i);
  }
  return { byKey, older };
}

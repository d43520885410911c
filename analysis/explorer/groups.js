// Points as groups: what else they differ in, and one value for the points that share a place.

import { content, isSetting, label, shown, value } from "explorer/data";

/** In which order settings tell points apart. What follows from other settings comes last. */
const ORDER = [
  "method", "cluster", "seqlen", "gpus", "phase", "mask", "documents", "kv_heads", "heads", "head_dim", "batch", "dtype",
  "wire_dtype", "workload", "impl", "method_options", "cluster_options", "options", "kernel", "code", "variant", "layout",
  "nodes", "device_name",
].filter(isSetting);

/** The fewest further settings, in that order, by which these records must be told apart beside `names`. */
export function others(rows, names) {
  const found = [];
  for (const name of ORDER) {
    if (names.includes(name)) continue;
    const seen = new Map();
    const differs = rows.some((i) => {
      const key = keyOf([...names, ...found], i);
      if (!seen.has(key)) seen.set(key, code(name, i));
      return seen.get(key) !== code(name, i);
    });
    if (differs) found.push(name);
  }
  return found;
}

/** A record's values of some settings as one key. */
export const keyOf = (names, i) => names.map((name) => code(name, i)).join("|");

/** The number of a record's value among those of the setting. */
export const code = (name, i) => content.settings[name].codes[i];

/** The records by their values of some settings: a Map from a key to {values: {setting: value}, rows: [i, ...]}. */
export function grouped(rows, names) {
  const found = new Map();
  for (const i of rows) {
    const key = keyOf(names, i);
    if (!found.has(key)) found.set(key, { values: Object.fromEntries(names.map((n) => [n, value(n, i)])), rows: [] });
    found.get(key).rows.push(i);
  }
  return found;
}

/** The record with the lowest, the middle or the highest of a result; null where none has a value. */
export function chosen(rows, name, which) {
  const known = rows.filter((i) => value(name, i) != null).sort((a, b) => value(name, a) - value(name, b));
  if (!known.length) return null;
  return known[{ lowest: 0, middle: (known.length - 1) >> 1, highest: known.length - 1 }[which]];
}

/** The name of a record's series: its value of a setting, with the kind of its numbers. */
export function seriesOf(name, i) {
  const kind = value("mode", i);
  return name === "mode" || !isSetting(name) ? kind : `${shown(name, value(name, i))} (${kind})`;
}

/** Settings in words: "sequence length and cluster". */
export function listed(names) {
  const words = names.map(label);
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

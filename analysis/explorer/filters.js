// Which records a filter keeps. A filter is {chosen: {setting: [value, ...]}, words: "text"}.

import { content, label, named, settings, shown, size, value } from "explorer/data";

export const nothing = () => ({ chosen: {}, words: "" });

/** The settings that have several values, which are the ones to filter by. */
export const facets = settings.filter((field) => content.settings[field.name].values.length > 1);

/** The settings that are the same in all records. */
export const constants = settings.filter((field) => content.settings[field.name].values.length === 1);

const searched = Array.from({ length: size }, (_, i) =>
  [named(i), ...facets.map((field) => shown(field.name, value(field.name, i))), content.id[i]].join(" ").toLowerCase(),
);

/**
 * The records that pass, in order, and for each facet how many would pass with each of its values:
 * {rows: [i, ...], counts: {setting: [number by code, ...]}}.
 */
export function filtered(filter) {
  const limits = Object.entries(filter.chosen).map(([name, values]) => {
    const column = content.settings[name];
    return { name, codes: column.codes, allowed: column.values.map((each) => values.includes(each)) };
  });
  const words = filter.words.toLowerCase().split(/\s+/).filter(Boolean);
  const counts = Object.fromEntries(facets.map(({ name }) => [name, content.settings[name].values.map(() => 0)]));
  const rows = [];
  for (let i = 0; i < size; i++) {
    if (!words.every((word) => searched[i].includes(word))) continue;
    const failed = limits.filter((limit) => !limit.allowed[limit.codes[i]]);
    if (failed.length === 0) rows.push(i);
    if (failed.length > 1) continue;
    // A record that only one facet keeps out would pass with another value there.
    const open = failed.length ? [failed[0].name] : Object.keys(counts);
    for (const name of open) counts[name][content.settings[name].codes[i]]++;
  }
  return { rows, counts };
}

/** The filter in words. */
export function inWords(filter) {
  const parts = Object.entries(filter.chosen).map(
    ([name, values]) => `${label(name)} ${values.map((each) => shown(name, each)).join(" or ")}`,
  );
  if (filter.words) parts.push(`with “${filter.words}”`);
  return parts.join(", ") || "all points";
}

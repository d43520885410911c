// The page's records as columns, and how their values are written.

export const content = JSON.parse(document.getElementById("records").textContent);
export const size = content.id.length;
export const settings = content.fields.settings.filter((field) => field.name in content.settings);
export const results = content.fields.results.filter((field) => field.name in content.results);

const byName = new Map([...settings, ...results].map((field) => [field.name, field]));

export const isSetting = (name) => name in content.settings;
export const isResult = (name) => name in content.results;
export const label = (name) => byName.get(name)?.label ?? name;
export const result = (name) => byName.get(name);

/** The label of a result with its unit. */
export function head(name) {
  const field = byName.get(name);
  return field.unit ? `${field.label} (${field.unit})` : field.label;
}

/** The value of a setting (text, number or null) or of a result (number or null) of record i. */
export function value(name, i) {
  const column = content.settings[name];
  return column ? column.values[column.codes[i]] : content.results[name][i];
}

/** The interval of a result of record i, [low, high]: 95% of a measured one, of a simulated one what two of three
 * measurements like it are within. null where it has none. */
export function interval(name, i) {
  const low = content.low[name]?.[i];
  const high = content.high[name]?.[i];
  return low == null || high == null ? null : [low, high];
}

/** A number in at most four digits, or whole where it is large. */
export function number(value) {
  if (value == null) return "–";
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(2);
  const options = Math.abs(value) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 };
  return value.toLocaleString("en", options);
}

/** Tokens as 256k or 1M where they are whole. */
export function tokens(value) {
  if (value && value % 2 ** 20 === 0) return `${value / 2 ** 20}M`;
  if (value && value % 2 ** 10 === 0) return `${value / 2 ** 10}k`;
  return String(value);
}

/** A value of a setting as text. */
export function shown(name, value) {
  if (value == null) return "none";
  return byName.get(name)?.words === "tokens" ? tokens(value) : String(value);
}

/** The value of record i as text, with its interval. */
export function text(name, i) {
  if (isSetting(name)) return shown(name, value(name, i));
  const ends = interval(name, i);
  return number(value(name, i)) + (ends ? ` [${number(ends[0])}, ${number(ends[1])}]` : "");
}

/** Method and variant of record i. */
export function named(i) {
  const variant = isSetting("variant") ? value("variant", i) : null;
  return variant ? `${value("method", i)} ${variant}` : value("method", i);
}

/** Record i in one line. */
export function described(i) {
  const where = `${value("gpus", i)} GPUs of ${value("cluster", i)}`;
  return `${named(i)}, ${where}, ${tokens(value("seqlen", i))} tokens, ${value("phase", i)}`;
}

/** What is known of record i beside its columns. */
export async function details(i) {
  const id = content.id[i];
  if (content.server) {
    const answer = await fetch(`points/${id}`);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }
  const found = await inflated(content.details[id]);
  if (found.matrices) found.matrices = await Promise.all(found.matrices.map((key) => inflated(content.parts[key])));
  return found;
}

async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

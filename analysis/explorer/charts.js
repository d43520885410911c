// Vega-Lite charts: what each shows, and the style that all share.

import { content, described, head, interval, label, number, shown, tokens, value } from "explorer/data";
import { chosen, grouped, keyOf, others, seriesOf } from "explorer/groups";

const GREYS = { light: ["#1a1c20", "#5a6068", "#e3e6ea", "#ffffff"], dark: ["#e6e8eb", "#a0a7b1", "#30353d", "#16181c"] };
const MORE = ["#4477aa", "#cc6677", "#228833", "#aa7733", "#aa3377", "#33a3b8", "#777777", "#882255"];
const KINDS = ["simulated", "measured", "measured alone"];
const SENT = "comm_bytes_per_gpu";
const BOUNDS = [["comm_bytes_lower_bound", "lower bound, GB", [1, 0]], ["comm_bytes_least", "with any split of heads, GB", [2, 2]]];
const MANY = 2000; // Marks from which a canvas is drawn instead of elements.

export const dark = () =>
  (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function config(width) {
  const [ink, faint, line, ground] = GREYS[dark() ? "dark" : "light"];
  const text = { labelColor: faint, titleColor: ink, labelFontSize: 12, titleFontSize: 12, titleFontWeight: 600 };
  return {
    background: ground,
    font: 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif',
    view: { stroke: null },
    axis: { ...text, gridColor: line, domainColor: faint, tickColor: faint, labelLimit: 220 },
    legend: { ...text, labelLimit: 260, symbolStrokeWidth: 2.5, orient: "bottom", columns: Math.max(1, Math.floor(width / 175)) },
    header: { ...text, labelColor: ink, labelFontWeight: 600 },
    title: { color: ink, fontSize: 13, anchor: "start" },
    text: { color: ink },
    rule: { color: ink },
  };
}

/** Draw a chart in an element. `open` is called with a record's number when its mark is clicked. */
export async function draw(element, spec, name, open) {
  const marks = spec.data?.values?.length ?? 0;
  const options = { renderer: marks > MANY ? "canvas" : "svg", actions: { export: true, source: false, compiled: false, editor: false } };
  const drawn = await globalThis.vegaEmbed(element, { ...spec, config: config(element.clientWidth || 600), description: name }, {
    ...options, downloadFileName: "sp_bench", tooltip: { theme: dark() ? "dark" : "light" },
  });
  if (open) {
    drawn.view.addEventListener("click", (_, item) => {
      const i = item?.datum?.i;
      if (i !== undefined) open(i);
    });
  }
  return drawn;
}

/** The colours of series, by name: those of methods are the same in every figure. */
function coloursOf(names, ofSeries) {
  const black = dark() ? "#f0f2f5" : "#1a1a1a";
  let next = 0;
  return names.map((name) => {
    const colour = content.colours[ofSeries.get(name)];
    return colour ? (colour === "#1a1a1a" ? black : colour) : MORE[next++ % MORE.length];
  });
}

/** Values of a setting in the order of its axis, as texts. */
function ordered(name, rows) {
  const there = new Set(rows.map((i) => value(name, i)));
  return content.settings[name].values.filter((each) => there.has(each)).map((each) => shown(name, each));
}

const numeric = (name, rows) => rows.every((i) => typeof value(name, i) === "number");

function datum(i, asked) {
  const ends = interval(asked.y, i);
  const found = { i, y: value(asked.y, i), low: ends?.[0], high: ends?.[1], series: seriesOf(asked.series, i), mode: value("mode", i) };
  found.point = described(i);
  found.shown = number(found.y) + (ends ? ` [${number(ends[0])}, ${number(ends[1])}]` : "");
  if (asked.split) found.split = splitOf(asked.split, i);
  if (asked.y === SENT) for (const [name] of BOUNDS) found[name] = value(name, i);
  return found;
}

/** Marks at the fewest bytes that can be sent, where what is sent is drawn and records have it. */
function boundMarks(values, x, y) {
  if (!values.some((each) => each.comm_bytes_lower_bound != null)) return [];
  return BOUNDS.map(([name, words, dash]) => ({
    transform: [{ filter: `isValid(datum.${name}) && datum.${name} > 0` }],
    mark: { type: "tick", orient: "horizontal", thickness: 2, size: 18, strokeDash: dash, tooltip: true },
    encoding: { ...x, y: { ...y, field: name }, color: { value: GREYS[dark() ? "dark" : "light"][0] },
      tooltip: [{ field: "point", title: "point" }, { field: name, title: words }] },
  }));
}

const splitOf = (name, i) => `${label(name)} ${shown(name, value(name, i))}`;

const tooltip = (asked) => [
  { field: "point", title: "point" },
  { field: "series", title: "series" },
  { field: "shown", title: head(asked.y) },
  { field: "of", title: "chosen from" },
];

function colour(rows, asked) {
  const ofSeries = new Map(rows.map((i) => [seriesOf(asked.series, i), value(asked.series, i)]));
  const order = content.settings[asked.series].values;
  const names = [...ofSeries.keys()].sort((a, b) => order.indexOf(ofSeries.get(a)) - order.indexOf(ofSeries.get(b)));
  return { field: "series", title: label(asked.series), scale: { domain: names, range: coloursOf(names, ofSeries) } };
}

/** Charts side by side, one for each value of a setting, all with the same axes. */
function split(layers, asked, rows, width) {
  const { data, ...inner } = layers;
  if (!asked.split) return { ...layers, width: Math.max(180, width - 80), height: 340 };
  const each = ordered(asked.split, rows).map((name) => `${label(asked.split)} ${name}`);
  const columns = Math.max(1, Math.min(each.length, Math.floor(width / 290)));
  return {
    data,
    facet: { field: "split", title: null, sort: each, header: { labelAnchor: "start" } },
    columns,
    spec: { ...inner, width: Math.max(170, width / columns - 75), height: 230 },
    spacing: 28,
  };
}

/** Lines: each joins points that differ only in what the axis shows. */
export function lines(rows, asked, width) {
  const known = rows.filter((i) => value(asked.y, i) != null);
  const by = ["mode", asked.series, asked.x, ...(asked.split ? [asked.split] : [])];
  const rest = others(known, by);
  const quantitative = numeric(asked.x, known);
  const values = known.map((i) => ({ ...datum(i, asked), x: quantitative ? value(asked.x, i) : shown(asked.x, value(asked.x, i)), line: keyOf(rest, i) }));
  const ticks = quantitative ? [...new Set(values.map((each) => each.x))].sort((a, b) => a - b) : [];
  const logarithmic = quantitative && ticks[0] > 0 && ticks.at(-1) / ticks[0] >= 4;
  const x = {
    field: "x", type: quantitative ? "quantitative" : "ordinal", title: label(asked.x),
    sort: quantitative ? null : ordered(asked.x, known),
    scale: logarithmic ? { type: "log", base: 2, nice: false, padding: 14 } : { zero: false, padding: 14 },
    axis: { grid: false, ...(quantitative && { values: ticks, labelOverlap: true }), ...(asked.x === "seqlen" && quantitative && { labelExpr: tokenLabels(ticks) }) },
  };
  const y = { field: "y", type: "quantitative", title: head(asked.y), axis: { tickCount: 5 }, scale: asked.log ? { type: "log", nice: false, padding: 8 } : { zero: true } };
  const severalKinds = new Set(known.map((i) => value("mode", i))).size > 1;
  const encoding = { x, y, color: colour(known, asked), detail: { field: "line" }, ...(severalKinds && { strokeDash: { field: "mode", legend: null, scale: { domain: KINDS, range: [[5, 3], [1, 0], [2, 2]] } } }) };
  const several = known.some((i) => interval(asked.y, i));
  const layer = [
    ...boundMarks(values, { x }, y),
    { mark: { type: "line", strokeWidth: 2, clip: true }, encoding },
    ...(several ? [{ mark: { type: "rule", strokeWidth: 1.5 }, encoding: { x, color: encoding.color, y: { field: "low", type: "quantitative", title: head(asked.y) }, y2: { field: "high" } } }] : []),
    { mark: { type: "point", filled: true, size: 55, opacity: 1, cursor: "pointer", tooltip: true },
      encoding: { x, y, color: encoding.color, shape: { field: "mode", legend: null, scale: { domain: KINDS, range: ["circle", "diamond", "square"] } }, tooltip: tooltip(asked).slice(0, 3) } },
  ];
  return { spec: split({ data: { values }, layer }, asked, known, width), rest, drawn: known };
}

const tokenLabels = (ticks) => `{${ticks.map((each) => `"${each}": "${tokens(each)}"`).join(",")}}[datum.value]`;

/** One point for each place of a chart: of several there the lowest, middle or highest. */
function places(rows, asked, names) {
  return [...grouped(rows, names).values()].flatMap(({ rows: there }) => {
    const i = chosen(there, asked.y, asked.which);
    return i === null ? [] : [{ ...datum(i, asked), of: there.length > 1 ? `${asked.which} of ${there.length}` : "one point" }];
  });
}

/** Bars: for each place the chosen point. */
export function bars(rows, asked, width) {
  const by = [...new Set(["mode", asked.series, asked.x, ...(asked.split ? [asked.split] : [])])];
  const values = places(rows, asked, by).map((each) => ({ ...each, x: shown(asked.x, value(asked.x, each.i)) }));
  const known = values.map((each) => each.i);
  const place = { x: { field: "x", type: "ordinal", title: label(asked.x), sort: ordered(asked.x, known), axis: { labelAngle: 0, labelOverlap: true } }, xOffset: { field: "series", sort: null } };
  const scale = colour(known, asked);
  place.xOffset.sort = scale.scale.domain;
  const title = head(asked.y);
  const layer = [
    { mark: { type: "bar", cursor: "pointer", tooltip: true }, encoding: { ...place, y: { field: "y", type: "quantitative", title }, color: scale, tooltip: tooltip(asked) } },
    ...(known.some((i) => interval(asked.y, i)) ? [{ mark: { type: "rule" }, encoding: { ...place, y: { field: "low", type: "quantitative", title }, y2: { field: "high" } } }] : []),
    ...boundMarks(values, place, { type: "quantitative", title }),
  ];
  return { spec: split({ data: { values }, layer }, asked, known, width), rest: others(withValue(rows, asked.y), by), drawn: known };
}

/** A heat map: for each place the chosen point, and a map for each kind of numbers. */
export function heat(rows, asked, width) {
  const by = [...new Set(["mode", asked.series, asked.x, ...(asked.split ? [asked.split] : [])])];
  const values = places(rows, asked, by).map((each) => ({
    ...each, x: shown(asked.x, value(asked.x, each.i)), row: shown(asked.series, value(asked.series, each.i)), text: number(each.y),
    split: [...(asked.split ? [each.split] : []), each.mode].join(", "),
  }));
  const known = values.map((each) => each.i);
  const high = values.map((each) => each.y).sort((a, b) => a - b).at(-1) ?? 1;
  const low = Math.min(...values.map((each) => each.y));
  const spread = low > 0 && high / low > 20;
  const axis = (field, name) => ({ field, type: "ordinal", title: label(name), sort: ordered(name, known), axis: { labelAngle: 0, domain: false, ticks: false } });
  const encoding = { x: axis("x", asked.x), y: axis("row", asked.series) };
  const scale = { scheme: "cividis", ...(spread ? { type: "log" } : { zero: false }) };
  const middle = spread ? Math.sqrt(low * high) : (low + high) / 2;
  const each = [...new Set(values.map((one) => one.split))];
  const columns = Math.max(1, Math.min(each.length, Math.floor(width / 380)));
  const inner = Math.max(150, width / columns - 130);
  const layer = [
    { mark: { type: "rect", cursor: "pointer", tooltip: true }, encoding: { ...encoding, color: { field: "y", type: "quantitative", title: head(asked.y), scale, legend: { gradientLength: Math.min(260, inner) } }, tooltip: tooltip(asked) } },
    ...(inner / new Set(values.map((one) => one.x)).size > 34 ? [{ mark: { type: "text", fontSize: 11 }, encoding: { ...encoding, text: { field: "text" }, color: { condition: { test: `datum.y > ${middle}`, value: "#101010" }, value: "#f5f5f5" } } }] : []),
  ];
  const rowsShown = new Set(values.map((one) => one.row)).size;
  return {
    spec: { data: { values }, facet: { field: "split", title: null, header: { labelAnchor: "start" } }, columns, spec: { layer, width: inner, height: Math.max(60, 30 * rowsShown) }, spacing: 28 },
    rest: others(withValue(rows, asked.y), by), drawn: known,
  };
}

const withValue = (rows, name) => rows.filter((i) => value(name, i) != null);

/** Ratios with their intervals, one line a pair. */
export function ratios(pairs, width) {
  const values = pairs.map((pair) => ({ ...pair, low: pair.low ?? pair.ratio, high: pair.high ?? pair.ratio }));
  const [good, bad, unknown, same] = dark() ? ["#6fd08c", "#ff9d73", "#a0a7b1", "#d0d4da"] : ["#146c2e", "#a32d00", "#8a9099", "#3b4048"];
  const palette = { FASTER: good, LESS: good, SAME: same, AMBIGUOUS: unknown, MORE: bad, SLOWER: bad };
  const domain = Object.keys(palette).filter((verdict) => pairs.some((pair) => pair.verdict === verdict));
  const color = { field: "verdict", title: "verdict", scale: { domain, range: domain.map((verdict) => palette[verdict]) } };
  const y = { field: "name", type: "ordinal", title: null, sort: null, axis: { labelLimit: Math.min(420, width / 2.2), grid: true } };
  const x = { type: "quantitative", title: "B / A", axis: { tickCount: 4, format: ".3~g" }, scale: { type: "log", nice: false, padding: 12 } };
  return {
    data: { values },
    width: Math.max(160, width - Math.min(440, width / 2.1)),
    height: { step: 22 },
    layer: [
      { data: { values: [{ one: 1 }] }, mark: { type: "rule", strokeDash: [4, 3] }, encoding: { x: { field: "one", ...x } } },
      { mark: { type: "rule", strokeWidth: 2.5 }, encoding: { y, x: { field: "low", ...x }, x2: { field: "high" }, color } },
      { mark: { type: "point", filled: true, size: 70, opacity: 1, tooltip: true }, encoding: { y, x: { field: "ratio", ...x }, color, tooltip: [{ field: "name", title: "point" }, { field: "shown", title: "B / A" }, { field: "verdict", title: "verdict" }] } },
    ],
  };
}

/** Bars of named amounts in bytes. */
export function amounts(named, width) {
  const values = Object.entries(named).map(([name, bytes]) => ({ name, gb: bytes / 1e9 }));
  return {
    data: { values }, width: Math.max(120, width - 190), height: { step: 20 }, mark: { type: "bar", tooltip: true, color: "#4477aa" },
    encoding: { y: { field: "name", type: "nominal", title: null, sort: null, axis: { labelLimit: 150 } }, x: { field: "gb", type: "quantitative", title: "GB per GPU and step" },
      tooltip: [{ field: "name", title: "of" }, { field: "gb", title: "GB", format: ".4s" }] },
  };
}

/** When each stream was busy. */
export function timeline(found, width) {
  const values = found.spans.map(([row, kind, start, end]) => ({ row: found.rows[row], kind: found.kinds[kind], start, end }));
  const ends = Object.entries(found.marks).map(([name, end]) => ({ name: Number.isNaN(Number(name)) ? name : `iteration ${name}`, end }));
  const last = Math.max(...ends.map((each) => each.end), ...values.map((each) => each.end));
  const x = { type: "quantitative", title: "ms", scale: { domain: [0, last], nice: false } };
  return {
    data: { values }, width: Math.max(160, width - 150), height: { step: 20 },
    layer: [
      { mark: { type: "bar", height: { band: 0.8 }, tooltip: true }, encoding: {
        y: { field: "row", type: "ordinal", title: null, sort: found.rows, axis: { grid: false, labelLimit: 140 } }, x: { field: "start", ...x }, x2: { field: "end" },
        color: { field: "kind", title: null, scale: { domain: found.kinds, range: ["#33689c", "#e09238"] } },
        tooltip: [{ field: "row" }, { field: "kind" }, { field: "start", title: "from, ms", format: ".5~g" }, { field: "end", title: "to, ms", format: ".5~g" }] } },
      { data: { values: ends }, mark: { type: "rule", strokeDash: [4, 3] }, encoding: { x: { field: "end", ...x } } },
    ],
  };
}

/** The rank or the step of each block. */
export function assignment(found, width) {
  const values = found.values.flatMap((each, k) => (each < 0 ? [] : [{ q: Math.floor(k / found.side), kv: k % found.side, value: each }]));
  const side = Math.max(140, Math.min(320, width - 90));
  const axis = (field, title) => ({ field, type: "ordinal", title, axis: { labelOverlap: true, labelAngle: 0, ticks: false, domain: false }, scale: { domain: Array.from({ length: found.side }, (_, k) => k), paddingInner: found.side > 24 ? 0 : 0.04 } });
  const rect = { mark: { type: "rect", tooltip: true }, encoding: { x: axis("kv", "KV chunk"), y: axis("q", "Q chunk"), color: { field: "value", type: "quantitative", title: found.by, scale: { scheme: "cividis" }, legend: { tickMinStep: 1, gradientLength: 160 } },
    tooltip: [{ field: "q", title: "Q chunk" }, { field: "kv", title: "KV chunk" }, { field: "value", title: found.by }] } };
  const high = Math.max(...values.map((each) => each.value));
  const texts = found.side <= 16 ? [{ mark: { type: "text", fontSize: 10 }, encoding: { x: rect.encoding.x, y: rect.encoding.y, text: { field: "value" }, color: { condition: { test: `datum.value > ${high / 2}`, value: "#101010" }, value: "#f5f5f5" } } }] : [];
  return { data: { values }, width: side, height: side, layer: [rect, ...texts], title: `${found.phase}, by ${found.by}` };
}


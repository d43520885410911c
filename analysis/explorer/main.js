// The page: filters at the side, views beside them, and the address that keeps both.

import * as chart from "explorer/chart_view";
import * as comparison from "explorer/compare_view";
import { content, label, shown, size } from "explorer/data";
import { byId, el } from "explorer/dom";
import { constants, facets, filtered, nothing } from "explorer/filters";
import { open as openPoint } from "explorer/point";
import { chooseColumns, fromStart, showPoints } from "explorer/tables";

const TABS = ["chart", "table", "compare"];
const state = { filter: nothing(), asked: first(), tab: "chart", point: "" };
let rows = [];

/** The first chart, of all points. */
function first() {
  const asked = chart.usual();
  return { ...asked, split: chart.usualSplit(filtered(nothing()).rows, asked) };
}

export function start() {
  read();
  byId("about").textContent = `${size.toLocaleString("en")} points. Simulated and measured numbers are never mixed in one series.`;
  byId("constants").querySelector("dl").replaceChildren(...constants.flatMap((field) =>
    [el("dt", {}, field.label), el("dd", {}, shown(field.name, content.settings[field.name].values[0]))]));
  byId("filters").open = matchMedia("(min-width: 761px)").matches;
  setUpFilters();
  setUpTabs();
  setUpTheme();
  chart.setUp(state.asked, (asked) => { state.asked = asked; update(); });
  chooseColumns(() => showPoints(rows, open));
  comparison.setUp(() => state.filter, () => comparison.render(open));
  addEventListener("resize", later(() => render(), 150));
  addEventListener("popstate", () => { read(); chart.show(state.asked); update(false); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
  update(false);
  if (state.point) open(content.id.indexOf(state.point));
}

/** Filter, and show what is left. How long it took stands in the page. */
function update(remember = true) {
  const begun = performance.now();
  const found = filtered(state.filter);
  rows = found.rows;
  const filterMs = performance.now() - begun;
  showFacets(found.counts);
  fromStart();
  const count = byId("count");
  count.textContent = `${rows.length.toLocaleString("en")} of ${size.toLocaleString("en")} points`;
  count.dataset.filterMs = filterMs.toFixed(2);
  count.dataset.updateMs = (performance.now() - begun).toFixed(2);
  if (remember) write();
  return render();
}

async function render() {
  if (state.tab === "chart") {
    chart.show(state.asked);
    await chart.render(rows, state.asked, open, change);
  } else if (state.tab === "table") showPoints(rows, open);
  else await comparison.render(open);
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
}

/** What a button of the chart asks for. */
function change({ split, keep }) {
  if (split !== undefined) state.asked = { ...state.asked, split };
  if (keep) state.filter.chosen[keep[0]] = [keep[1]];
  update();
}

async function open(i) {
  if (i < 0) return;
  state.point = content.id[i];
  write();
  await openPoint(i, () => { state.point = ""; write(); });
}

/** Settings that mostly follow from others: their filters are folded. */
const FOLDED = ["variant", "layout", "method_options", "cluster_options", "options", "nodes", "device_name", "bound_by", "code"];

function setUpFilters() {
  const made = facets.map((field) => el("fieldset", { "data-setting": field.name },
    el("legend", {}, field.label),
    el("div", {}, ...content.settings[field.name].values.map((each, k) => el("label", {},
      el("input", { type: "checkbox", "data-code": k, change: (event) => choose(field.name, each, event.target.checked) }),
      el("span", {}, shown(field.name, each)), el("span", { class: "n" })))),
  ));
  const folded = (one) => FOLDED.includes(one.dataset.setting);
  byId("facets").replaceChildren(...made.filter((one) => !folded(one)));
  byId("rest").lastElementChild.replaceChildren(...made.filter(folded));
  byId("rest").hidden = !made.some(folded);
  byId("words").addEventListener("input", later(() => { state.filter.words = byId("words").value; update(); }, 80));
  byId("clear").addEventListener("click", () => { state.filter = nothing(); update(); });
}

function choose(name, each, on) {
  const before = state.filter.chosen[name] ?? [];
  const after = on ? [...before, each] : before.filter((other) => other !== each);
  if (after.length) state.filter.chosen[name] = after;
  else delete state.filter.chosen[name];
  update();
}

function showFacets(counts) {
  for (const { name } of facets) {
    const chosen = state.filter.chosen[name] ?? [];
    byId("filters").querySelectorAll(`[data-setting="${name}"] label`).forEach((made, k) => {
      made.firstChild.checked = chosen.includes(content.settings[name].values[k]);
      made.lastChild.textContent = counts[name][k].toLocaleString("en");
      made.classList.toggle("empty", counts[name][k] === 0);
    });
  }
  if (byId("words") !== document.activeElement) byId("words").value = state.filter.words;
  const active = Object.keys(state.filter.chosen);
  byId("active").textContent = active.length ? `(${active.map(label).join(", ")})` : "";
  byId("clear").disabled = !active.length && !state.filter.words;
}

function setUpTabs() {
  const show = (name) => {
    state.tab = name;
    for (const each of TABS) {
      byId(`tab-${each}`).setAttribute("aria-selected", each === name);
      byId(`tab-${each}`).tabIndex = each === name ? 0 : -1;
      byId(`panel-${each}`).hidden = each !== name;
    }
  };
  for (const [k, each] of TABS.entries()) {
    byId(`tab-${each}`).addEventListener("click", () => { show(each); write(); render(); });
    byId(`tab-${each}`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) byId(`tab-${TABS[(k + step + TABS.length) % TABS.length]}`).focus();
      if (step) document.activeElement.click();
    });
  }
  show(state.tab);
}

function setUpTheme() {
  byId("theme").addEventListener("change", () => {
    document.documentElement.dataset.theme = byId("theme").value;
    render();
  });
}

function later(run, ms) {
  let timer;
  return () => { clearTimeout(timer); timer = setTimeout(run, ms); };
}

/** The page's state in its address, so that a link or the Back button leads to it. */
function write() {
  const { filter, asked, tab, point } = state;
  const text = `#${encodeURIComponent(JSON.stringify({ ...filter, asked, tab, point }))}`;
  if (text !== location.hash) history.pushState(null, "", text);
}

function read() {
  try {
    const { chosen = {}, words = "", asked = {}, tab = "chart", point = "" } = JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}");
    state.filter = { chosen: Object.fromEntries(Object.entries(chosen).filter(([name]) => name in content.settings)), words };
    state.asked = { ...first(), ...chart.known(asked) };
    state.tab = TABS.includes(tab) ? tab : "chart";
    state.point = point;
  } catch {
    Object.assign(state, { filter: nothing(), asked: first() });
  }
}

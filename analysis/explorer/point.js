// A point that was opened: what it is, its timeline, matrices, bytes, provenance and command.

import { amounts, assignment, draw, timeline } from "explorer/charts";
import { content, described, details, isSetting, label, head, result, results, settings, text, value } from "explorer/data";
import { byId, el, table } from "explorer/dom";

const FIRST = ["step_ms_median", "mfu", "comm_bytes_per_gpu", "peak_mem_bytes_max", "exposed_comm_ms"];

/** Open record i in a dialog; `closed` is called when it is closed. */
export async function open(i, closed) {
  const dialog = byId("point");
  const close = el("button", { type: "button", click: () => dialog.close() }, "Close");
  const body = el("div", {}, el("p", {}, "Reading …"));
  dialog.replaceChildren(el("header", {}, el("h2", { id: "point-title" }, described(i)), close), body);
  dialog.onclose = closed;
  if (!dialog.open) dialog.showModal();
  try {
    body.replaceChildren(...(await parts(i, await details(i))));
  } catch (error) {
    body.replaceChildren(el("p", { role: "alert" }, `This point can't be read: ${error.message}`));
  }
  await pictures(body);
}

let waiting = [];

async function pictures(body) {
  const todo = waiting;
  waiting = [];
  for (const [element, spec, name] of todo) await draw(element, spec(element.clientWidth || body.clientWidth), name);
}

function picture(spec, name) {
  const element = el("div", { class: "picture", role: "figure", "aria-label": name });
  waiting.push([element, spec, name]);
  return element;
}

function list(pairs) {
  return el("dl", {}, ...pairs.flatMap(([name, each]) => [el("dt", {}, name), el("dd", {}, each)]));
}

const has = (object) => Object.keys(object ?? {}).length > 0;

async function parts(i, found) {
  waiting = [];
  const mode = value("mode", i);
  const made = [el("p", { class: mode === "simulated" ? "simulated" : "measured" }, content.kinds[mode].replace(/^./, (letter) => letter.toUpperCase())),
    list(FIRST.filter((name) => result(name) && value(name, i) != null).map((name) => [head(name), text(name, i)]))];
  if (found.error) made.push(el("p", { role: "alert" }, `${value("status", i)}: ${found.error}`));
  for (const note of found.notes) made.push(el("p", { class: "note" }, note));
  if (found.command) made.push(...commandOf(found.command));
  if (found.timeline) made.push(...timelineOf(found.timeline));
  if (found.matrices?.length) made.push(...matricesOf(found.matrices));
  if (has(found.links) || has(found.lanes)) made.push(el("h3", {}, "Bytes by link and by lane"), el("div", { class: "pair" },
    has(found.links) ? picture((width) => amounts(found.links, width), "Bytes by class of links") : null,
    has(found.lanes) ? picture((width) => amounts(found.lanes, width), "Bytes by phase and lane") : null));
  for (const why of found.missing ?? []) made.push(el("p", { class: "note" }, why));
  if (found.missing === undefined) made.push(el("p", { class: "note" }, "Timeline and matrices of this point are not in the file: --serve, or a larger drawings=, shows them."));
  if (found.candidates.length) made.push(...candidatesOf(found.candidates));
  made.push(...everything(i, found));
  return made;
}

function commandOf(command) {
  const said = el("span", { role: "status" });
  const copy = el("button", { type: "button", click: async () => {
    await navigator.clipboard.writeText(command);
    said.textContent = " copied";
  } }, "Copy");
  return [el("h3", {}, "The command that makes it again"), el("pre", { id: "command" }, command), copy, said];
}

function timelineOf(found) {
  const [ranks, all] = found.ranks;
  const words = found.iterations
    ? `Ranks 0 to ${ranks - 1}, the first ${found.iterations[0]} of ${found.iterations[1]} iterations end to end. All ranks start a phase together; gaps are waiting for the slowest.`
    : `${ranks} of ${all} recorded ranks. Spans closer than a thousandth of the step are joined. Dashed lines: a phase ends.`;
  return [el("h3", {}, "Timeline"), picture((width) => timeline(found, width), "Timeline of the step"), el("p", { class: "note" }, words)];
}

function matricesOf(matrices) {
  const [first] = matrices;
  const corner = first.side < first.chunks ? ` The first ${first.side} of ${first.chunks} chunks along each side.` : "";
  const heads = first.heads > 1 ? ` Of ${first.heads} ranks that split a block's heads, the lowest is shown.` : "";
  return [el("h3", {}, "Assignment matrix"),
    el("div", { class: "pair" }, ...matrices.map((each) => picture((width) => assignment(each, width), `Assignment matrix, ${each.phase}, by ${each.by}`))),
    el("p", { class: "note" }, `Chunks of ${first.tokens.toLocaleString("en")} tokens. Blocks without a colour are computed by no rank.${corner}${heads}`)];
}

function candidatesOf(candidates) {
  const names = [...new Set(candidates.flatMap((each) => Object.keys(each)))];
  const cell = (each) => (typeof each === "number" ? each.toPrecision(5) : String(each ?? "–"));
  const rows = candidates.map((each) => names.map((name) => cell(each[name])));
  return [el("details", {}, el("summary", {}, `${candidates.length} variants were considered`),
    el("div", { class: "scroll" }, table("Variants", names.map((name) => ({ text: name.replaceAll("_", " ") })), rows)))];
}

function everything(i, found) {
  const known = [...settings, ...results].map((field) => field.name).filter((name) => value(name, i) != null);
  const flat = (object, before = "") => Object.entries(object).flatMap(([name, each]) =>
    each && typeof each === "object" && !Array.isArray(each) ? flat(each, `${before}${name}, `) : [[`${before}${name}`.replaceAll("_", " "), String(each)]]);
  return [el("h3", {}, "Provenance"), list([["record", found.file], ["run_id", content.id[i]], ...flat(found.provenance)]),
    el("details", {}, el("summary", {}, "All settings and results"), list(known.map((name) => [isSetting(name) ? label(name) : head(name), text(name, i)])))];
}

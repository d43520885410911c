// Elements from names, attributes and children. All text is text: nothing of a record is read as HTML.

/** A new element; attributes that are functions become listeners, false and null ones are left out. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, each] of Object.entries(attributes)) {
    if (typeof each === "function") made.addEventListener(name, each);
    else if (each !== false && each != null) made.setAttribute(name, each === true ? "" : each);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Replace the options of a select by [value, text] pairs, keeping or setting its choice. */
export function options(select, pairs, choice = select.value) {
  select.replaceChildren(...pairs.map(([each, text]) => el("option", { value: each, selected: String(each) === String(choice) }, text)));
}

/** A table with a caption, heads of {text, number}, and rows of cells (text or elements). */
export function table(caption, heads, rows) {
  const cell = (tag, each, k) => el(tag, { class: heads[k].number && "number", scope: tag === "th" && "col" }, each);
  return el("table", {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...heads.map((each, k) => cell("th", each.text, k)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((each, k) => cell("td", each, k))))),
  );
}

/** A button that opens a point. */
export const opener = (text, i, open) => el("button", { type: "button", class: "open", click: () => open(i) }, text);

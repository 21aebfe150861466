"use strict";
const page = document.body.dataset.page, token = document.body.dataset.token, single = document.body.dataset.single === "yes";
const main = document.getElementById("main"), live = document.getElementById("live");
const chosen = new URLSearchParams(location.search);
const history_ = [];  // batches of saved edits, for undo
let seen = "", ended = null;

function draw(box) {
  const data = JSON.parse(box.dataset.chart);
  const style = getComputedStyle(document.body), ink = style.color, line = style.getPropertyValue("--line").trim();
  const axis = (title) => ({title: {text: title, standoff: 12}, gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true});
  if (!data.traces.length) { box.textContent = "Nothing to show yet."; box.style.height = "auto"; return; }
  if (typeof Plotly === "undefined") { library().then(() => draw(box)); return; }
  Plotly.react(box, data.traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: ink, size: 12}, uirevision: "same", height: 340,
    margin: {l: 50, r: 10, t: 10, b: 40}, xaxis: axis(data.x), yaxis: {...axis(data.y), type: data.log ? "log" : "linear"},
    showlegend: data.traces.length > 1, legend: {orientation: "h", y: 1.02, yanchor: "bottom"},
  }, {displaylogo: false, responsive: true, displayModeBar: false});
}

let loading = null;
function library() {  // of charts: loaded by the first page that has one
  const made = (onload, onerror) => Object.assign(document.createElement("script"), {src: "static/plotly.js", onload, onerror});
  return loading ||= new Promise((resolve, reject) => document.head.append(made(resolve, reject)));
}

function step(slider) {
  const steps = slider.dataset.steps.split(",").map(Number), now = steps[Number(slider.value)];
  const block = slider.closest(".block");
  block.querySelector("output").textContent = now;
  block.querySelectorAll("img[data-pictures]").forEach((image) => {
    const [common, ...pictures] = JSON.parse(image.dataset.pictures);
    const [at, rest] = pictures.filter(([made]) => made <= now).pop() || pictures[0];
    if (image.getAttribute("src") !== common + rest) image.src = common + rest;
    image.alt = `${image.dataset.about}, step ${at}`;
    const label = image.parentElement.querySelector("span");
    if (label) label.textContent = `step ${at}`;
  });
}

function ready(root) { root.querySelectorAll("[data-chart]").forEach(draw); root.querySelectorAll("input[data-steps]").forEach(step); }

async function show(update) {
  const answer = await fetch(`fragment/${page}?${chosen}`);
  const text = await answer.text();
  seen = answer.headers.get("X-Seen") || seen;
  if (!answer.ok) { main.replaceChildren(Object.assign(document.createElement("p"), {className: "error", textContent: text})); return; }
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const blocks = [...fresh.querySelectorAll(".block")], old = [...main.querySelectorAll(".block")];
  const had = document.activeElement, place = alike(had).indexOf(had);
  if (!update || blocks.map((b) => b.id).join() !== old.map((b) => b.id).join()) {
    if (update && old.some(typed)) return;
    main.replaceChildren(...blocks);
    ready(main);
  } else {
    blocks.forEach((block, n) => replace(old[n], block));
  }
  if (!had.isConnected) alike(had)[place]?.focus({preventScroll: true});
  if (!update) told = "";
  else if (![...main.querySelectorAll("[data-said]")].some((place) => place.textContent === told)) said(told);
  undoable();
  performance.mark("shown");
  document.body.dataset.shown = String(Number(document.body.dataset.shown || 0) + 1);
}

function alike(element) {  // what has the same place for who uses the keyboard, before and after a refresh
  const key = (e) => [e.name, e.id, e.dataset.job, e.getAttribute("href"), e.getAttribute("alt"), e.matches("button") && e.textContent].join();
  return [...main.querySelectorAll(element.tagName)].filter((each) => key(each) === key(element));
}

function replace(old, block) {
  const chart = old.querySelector("[data-chart]"), next = block.querySelector("[data-chart]");
  if (chart && next) {
    if (chart.dataset.chart !== next.dataset.chart) { chart.dataset.chart = next.dataset.chart; chart.style.height = ""; draw(chart); }
    return;
  }
  const slider = old.querySelector("input[data-steps]"), value = slider && slider.value;
  if (old.dataset.text === block.innerHTML || typed(old)) return;
  old.querySelectorAll("details[id]").forEach(({id, open}) => { const now = block.querySelector(`#${id}`); if (now) now.open = open; });
  block.dataset.text = block.innerHTML;
  old.replaceWith(block);
  const moved = block.querySelector("input[data-steps]");
  if (moved && value !== null && value !== slider.max) moved.value = value;
  ready(block);
}

function typed(block) {  // something in it would be lost: a text, a choice, an answer to a conflict
  const changed = (field) => field.tagName === "SELECT" ? [...field.options].some((o) => o.selected !== o.defaultSelected) && !field.dataset.choose
    : field.type !== "range" && field.value !== field.defaultValue;
  return block.querySelector(".changed, .theirs, textarea:focus, input:not([type=range]):focus") !== null
    || [...block.querySelectorAll("textarea, input, form select")].some(changed);
}

function listen() {  // the browser connects again by itself
  const events = new EventSource("events");
  events.addEventListener("open", () => { live.textContent = ""; });
  events.addEventListener("changes", ({data}) => { if (data !== seen) show(true); });
  events.addEventListener("progress", ({data}) => {
    const told = JSON.parse(data), line = main.querySelector("[data-progress]"), news = told.ended && ended !== null && told.ended !== ended;
    ended = told.ended;
    if (news) live.textContent = ended;
    if (news && window.Notification?.permission === "granted") new Notification(ended, {body: document.title});
    if (!line || !told.text) return;
    Object.assign(line.querySelector("progress"), {max: told.total, value: told.done});
    line.querySelector("span").textContent = told.text;
  });
  events.addEventListener("error", () => { live.textContent = "the page's program has ended"; });
}

async function act(what, body, place) {
  try {
    const answer = await send("do", body, what);
    place.textContent = told = answer.said;
    if (answer.go) location.assign(answer.go); else await show(true);
  } catch (error) { place.textContent = told = error.message; await show(true); }
}

function unsaved() { return main.querySelector(".changed") !== null; }

function choose(name, value) {
  if (unsaved() && !confirm("Leave without saving the changed texts?")) return;
  chosen.set(name, value);
  if (name !== "page") chosen.delete("page");
  history.replaceState(null, "", `?${chosen}`);
  show(false);
}

let told = "";  // stays when the page is refreshed because something has changed

function said(text) { const place = main.querySelector("[data-said]"); if (place) place.textContent = told = text; }

async function send(what, body, to = page) {
  const headers = {"X-Token": token, "Content-Type": "application/json"}, sent = body instanceof Blob ? body : JSON.stringify(body);
  const answer = await fetch(`${what}/${to}`, {method: "POST", headers, body: sent});
  if (answer.status !== 200 && answer.status !== 409) throw new Error(await answer.text());
  return answer.json();
}

async function upload(input) {  // in parts; what is there already is not sent again
  const files = [...input.files], place = main.querySelector("[data-said]"), list = files.map((f) => [f.webkitRelativePath || f.name, f.size, f.lastModified]);
  try {
    const {have, said: note} = await send("do", {files: list}, "announce");
    for (const [n, file] of files.entries()) {
      for (let [key, at] = have[n]; key && at < file.size;) at = (await send("part", file.slice(at, at + 4_000_000), `${key}?at=${at}`)).have;
      place.textContent = told = `${n + 1} of ${files.length} files are here`;
    }
    place.textContent = told = [told, note].filter(Boolean).join("; ");
  } catch (error) { place.textContent = told = `${error.message}: choose the same files again to go on`; }
  input.value = "";
  await show(true);
}

async function post(edits) {  // in parts, each below the largest body that the program takes
  const parts = [{}], conflicts = {}, editor = main.querySelector("[data-editor]")?.dataset.editor || page;
  let size = 0;
  for (const [key, edit] of Object.entries(edits)) {
    const more = JSON.stringify(edit).length;
    if (size && size + more > 1_000_000) { parts.push({}); size = 0; }
    parts[parts.length - 1][key] = edit;
    size += more;
  }
  for (const part of parts) Object.assign(conflicts, (await send("edit", part, editor)).conflicts);
  return conflicts;
}

function remember(edits) {  // a text without an earlier edit is undone by taking the edit back
  const back = ([key, {before, text, edited}]) => [key, {before: text, text: edited ? before : null}];
  history_.push(Object.fromEntries(Object.entries(edits).map(back)));
}

function undoable() { main.querySelectorAll("[data-undo]").forEach((button) => { button.disabled = !history_.length; }); }

async function attempt(work) {
  if (unsaved()) { said("save your changes first"); return; }
  try { await work(); } catch (error) { said(error.message); }
}

async function replaceAll(form) {
  const {edits} = await send("replace", {find: form.elements.find.value, by: form.elements.replace.value});
  const count = Object.keys(edits).length;
  if (count) remember(edits);
  await show(false);
  said(`${count} saved`);
}

async function files(undo) {
  if (!undo && !confirm("Write the edited captions into the caption files beside your images? Their old content is kept in the project.")) return;
  const answer = await send("files", {undo});
  history_.length = 0;
  await show(false);
  said(answer.said);
}

async function undo() {
  const last = history_.pop();
  if (!last) return;
  const conflicts = Object.keys(await post(last).catch((error) => { history_.push(last); throw error; }));
  await show(false);
  said(conflicts.length ? `${conflicts.length} texts were changed elsewhere and stay; the others are undone` : "undone");
}

async function save(edits) {
  try {
    const conflicts = await post(edits), count = Object.keys(conflicts).length;
    const done = Object.entries(edits).filter(([key]) => !(key in conflicts));
    if (done.length) remember(Object.fromEntries(done));
    if (!count) await show(false);
    else done.forEach(([key, {text}]) => { area(key).dataset.before = text; area(key).closest("li").classList.add("edited"); mark(area(key)); });
    Object.entries(conflicts).forEach(([key, text]) => conflict(area(key), text));
    said(`${done.length} saved${count ? `, ${count} not: they were changed elsewhere meanwhile` : ""}`);
    undoable();
  } catch (error) { said(error.message); }
}

function area(key) { return main.querySelector(`textarea[data-key="${CSS.escape(key)}"]`); }

function conflict(box, theirs) {  // both texts stay on the page until the user has chosen
  const item = box.closest("li"), note = document.createElement("div"), mine = document.createElement("button");
  item.querySelectorAll(".theirs").forEach((old) => old.remove());
  item.classList.add("conflict");
  note.className = "theirs";
  note.append("Changed elsewhere to: ", Object.assign(document.createElement("q"), {textContent: theirs}), " ", mine);
  Object.assign(mine, {type: "button", textContent: "Save mine over it"});
  mine.addEventListener("click", () => { box.dataset.before = theirs; item.classList.add("edited"); save(edited()); });
  box.closest("div").append(note);
}

function edited() {
  const areas = [...main.querySelectorAll("textarea[data-key]")].filter((box) => box.value.trim() !== box.dataset.before.trim());
  const change = (box) => ({before: box.dataset.before, text: box.value.trim(), edited: box.closest("li").classList.contains("edited")});
  return Object.fromEntries(areas.map((box) => [box.dataset.key, change(box)]));
}

async function revert(box) {
  const conflicts = await post({[box.dataset.key]: {before: box.dataset.before, text: null}});
  await show(false);
  said(box.dataset.key in conflicts ? "changed elsewhere meanwhile: not taken back" : "taken back");
}

main.addEventListener("click", (event) => {
  const target = event.target;
  if (target.matches("button[data-choose]")) choose(target.dataset.choose, target.value);
  else if (target.matches("[data-save]")) save(edited());
  else if (target.matches("[data-undo]")) attempt(undo);
  else if (target.matches("[data-notify]")) Notification.requestPermission().then((answer) => said(`notifications: ${answer}`));
  else if (target.matches("[data-sure]") && !confirm(`${target.dataset.sure} Begin?`)) return;
  else if (target.matches("[data-do]")) act(target.dataset.do, target.dataset.job ? {job: Number(target.dataset.job)} : {sure: target.dataset.sure}, main.querySelector("[data-said]"));
  else if (target.matches("[data-files]")) attempt(() => files(target.dataset.files === "undo"));
  else if (target.matches("[data-replace-all]")) attempt(() => replaceAll(target.closest("form")));
  else if (target.matches("[data-revert]")) attempt(() => revert(target.closest("li").querySelector("textarea")));
  else if (target.matches("[data-use]")) {
    const box = target.closest("li").querySelector("textarea");
    box.value = target.dataset.use;
    mark(box);
  } else if (target.matches("[data-replace]")) {
    const form = target.closest("form"), find = form.elements.find.value, by = form.elements.replace.value;
    if (find) main.querySelectorAll("textarea[data-key]").forEach((box) => { box.value = box.value.split(find).join(by); mark(box); });
  } else if (target.matches("img.result")) enlarge(target);
});
main.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches("img.result")) { event.preventDefault(); enlarge(event.target); }  // else it would press Close
  if (!event.ctrlKey && !event.metaKey) return;
  if (event.key === "Enter" && event.target.id === "sql") event.target.form.requestSubmit();
  if (event.key === "s" && main.querySelector("[data-save]")) { event.preventDefault(); if (unsaved()) save(edited()); }
});
main.addEventListener("submit", (event) => {
  if (event.target.method === "post") { event.target.querySelectorAll(".changed").forEach((field) => field.classList.remove("changed")); return; }
  event.preventDefault();
  if (event.target.matches("[data-act]")) {
    const form = event.target, body = {page, block: Number(form.dataset.block), ...Object.fromEntries(new FormData(form))};
    act(form.dataset.act, body, form.querySelector("[data-said]"));
  }
  if (event.target.matches("[data-find]")) choose("find", event.target.elements.find.value);
  if (event.target.matches("[data-sql]")) choose("sql", event.target.elements.sql.value);
});
main.addEventListener("change", (event) => {
  if (event.target.type === "file") upload(event.target);
  if (event.target.matches("select[data-choose]")) choose(event.target.dataset.choose, event.target.value);
  if (event.target.matches("select[data-panel]") && event.target.value) choose("sql", event.target.value);
});
main.addEventListener("input", (event) => {
  if (event.target.matches("input[data-steps]")) step(event.target);
  if (event.target.matches("input[data-wipe]")) event.target.closest(".block").style.setProperty("--wipe", `${event.target.value}%`);
  if (event.target.matches("textarea[data-key]")) mark(event.target);
  if (event.target.form?.method === "post") event.target.classList.add("changed");
});

function mark(box) {
  box.closest("li").classList.toggle("changed", box.value.trim() !== box.dataset.before.trim());
  main.querySelectorAll("[data-save]").forEach((button) => { button.disabled = !unsaved(); });
}

function enlarge(image) {
  const dialog = document.getElementById("large"), link = dialog.querySelector("a");
  const full = single ? image.src : image.src.replace(/size=\d+$/, "size=file");
  Object.assign(dialog.querySelector("img"), {src: full, alt: image.alt});
  dialog.querySelector("p").textContent = image.alt;
  Object.assign(link, {href: full, hidden: single});
  dialog.showModal();
}

addEventListener("keydown", (event) => {  // to the next or previous picture, where the arrows do nothing else
  const side = {ArrowLeft: "prev", ArrowRight: "next"}[event.key], other = event.altKey || event.ctrlKey || event.metaKey || event.shiftKey;
  if (side && !other && !event.target.closest("input, textarea, select, .wide")) main.querySelector(`a[rel=${side}]`)?.click();
});
addEventListener("beforeunload", (event) => { if (unsaved()) event.preventDefault(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => ready(main));
if (single) { ready(main); }
else if (document.body.dataset.whole === undefined) show(false).then(listen);

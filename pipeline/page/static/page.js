"use strict";
const page = document.body.dataset.page, token = document.body.dataset.token, single = document.body.dataset.single === "yes";
const main = document.getElementById("main"), live = document.getElementById("live");
const chosen = new URLSearchParams(location.search);
const history_ = [];  // batches of saved edits, for undo
let seen = "";

function draw(box) {
  const data = JSON.parse(box.dataset.chart);
  const style = getComputedStyle(document.body), ink = style.color, line = style.getPropertyValue("--line").trim();
  const axis = (title) => ({title: {text: title}, gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true});
  if (!data.traces.length) { box.textContent = "Nothing to show yet."; box.style.height = "auto"; return; }
  if (typeof Plotly === "undefined") { addEventListener("load", () => draw(box), {once: true}); return; }
  Plotly.react(box, data.traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: ink, size: 12}, uirevision: "same", height: 340,
    margin: {l: 50, r: 10, t: 10, b: 40}, xaxis: axis(data.x), yaxis: {...axis(data.y), type: data.log ? "log" : "linear"},
    showlegend: data.traces.length > 1, legend: {orientation: "h", y: -0.25},
  }, {displaylogo: false, responsive: true, displayModeBar: false});
}

function charts(root) { root.querySelectorAll("[data-chart]").forEach(draw); }

function step(slider) {
  const steps = slider.dataset.steps.split(",").map(Number), now = steps[Number(slider.value)];
  const block = slider.closest(".block");
  block.querySelector("output").textContent = now;
  block.querySelectorAll(".sheet td").forEach((cell) => {
    const images = [...cell.querySelectorAll("img.result")];
    const best = images.filter((image) => Number(image.dataset.step) <= now).pop() || images[0];
    images.forEach((image) => { image.hidden = image !== best; });
  });
}

function sliders(root) { root.querySelectorAll("input[data-steps]").forEach(step); }

async function show(update) {
  const answer = await fetch(`/fragment/${page}?${chosen}`);
  const text = await answer.text();
  if (!answer.ok) { main.replaceChildren(Object.assign(document.createElement("p"), {className: "error", textContent: text})); return; }
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const blocks = [...fresh.querySelectorAll(".block")], old = [...main.querySelectorAll(".block")];
  if (!update || blocks.map((b) => b.id).join() !== old.map((b) => b.id).join()) {
    main.replaceChildren(...blocks);
    charts(main); sliders(main);
  } else {
    blocks.forEach((block, n) => replace(old[n], block));
  }
  document.body.dataset.shown = String(Number(document.body.dataset.shown || 0) + 1);
}

function replace(old, block) {
  const chart = old.querySelector("[data-chart]"), next = block.querySelector("[data-chart]");
  if (chart && next) {
    if (chart.dataset.chart !== next.dataset.chart) { chart.dataset.chart = next.dataset.chart; chart.style.height = ""; draw(chart); }
    return;
  }
  const slider = old.querySelector("input[data-steps]"), value = slider && slider.value;
  if (old.dataset.text === block.innerHTML) return;
  block.dataset.text = block.innerHTML;
  old.replaceWith(block);
  const moved = block.querySelector("input[data-steps]");
  if (moved && value !== null && value !== slider.max) moved.value = value;
  sliders(block);
}

function dirty() { return main.querySelector(".changed") !== null || main.contains(document.activeElement) && /TEXTAREA|INPUT/.test(document.activeElement.tagName); }

async function poll() {
  try {
    const now = await (await fetch("/changes")).text();
    if (seen && now !== seen && !dirty()) { await show(true); seen = now; } else if (!seen) { seen = now; }
    live.textContent = "";
  } catch { live.textContent = "the page's program has ended"; }
  setTimeout(poll, 2000);
}

function choose(name, value) {
  chosen.set(name, value);
  if (name !== "page") chosen.delete("page");
  history.replaceState(null, "", `?${chosen}`);
  show(false);
}

function said(text) { const place = main.querySelector("[data-said]"); if (place) place.textContent = text; }

async function post(edits) {
  const answer = await fetch(`/edit/${page}`, {method: "POST", headers: {"X-Token": token, "Content-Type": "application/json"}, body: JSON.stringify(edits)});
  if (answer.status !== 200 && answer.status !== 409) throw new Error(await answer.text());
  return (await answer.json()).conflicts;
}

async function save(edits) {
  try {
    const conflicts = await post(edits);
    const done = Object.entries(edits).filter(([key]) => !conflicts.includes(key));
    if (done.length) history_.push(Object.fromEntries(done.map(([key, edit]) => [key, {before: edit.text, text: edit.before}])));
    main.querySelectorAll("textarea[data-key]").forEach((area) => {
      if (conflicts.includes(area.dataset.key)) area.closest("li").classList.add("conflict");
      else if (area.dataset.key in edits) area.closest("li").classList.remove("changed");
    });
    if (conflicts.length) { said(`${conflicts.length} texts were changed elsewhere and are not saved: copy yours, then load the page again`); return; }
    await show(false);
    said(`${done.length} saved`);
    main.querySelectorAll("[data-undo]").forEach((button) => { button.disabled = !history_.length; });
  } catch (error) { said(error.message); }
}

function edited() {
  const areas = [...main.querySelectorAll("textarea[data-key]")].filter((area) => area.value !== area.dataset.before);
  return Object.fromEntries(areas.map((area) => [area.dataset.key, {before: area.dataset.before, text: area.value}]));
}

main.addEventListener("click", (event) => {
  const target = event.target;
  if (target.matches("button[data-choose]")) choose(target.dataset.choose, target.value);
  else if (target.matches("[data-save]")) save(edited());
  else if (target.matches("[data-undo]")) { const last = history_.pop(); if (last) post(last).then(() => show(false)).then(() => said("undone")).catch((error) => said(error.message)); }
  else if (target.matches("[data-revert]")) {
    const area = target.closest("li").querySelector("textarea");
    post({[target.dataset.revert]: {before: area.dataset.before, text: null}}).then(() => show(false)).catch((error) => said(error.message));
  } else if (target.matches("[data-replace]")) {
    const form = target.closest("form"), find = form.elements.find.value, by = form.elements.replace.value;
    if (find) main.querySelectorAll("textarea[data-key]").forEach((area) => { area.value = area.value.split(find).join(by); mark(area); });
  } else if (target.matches("img.result")) enlarge(target);
});
main.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches("img.result")) enlarge(event.target);
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.id === "sql") event.target.form.requestSubmit();
});
main.addEventListener("submit", (event) => {
  event.preventDefault();
  if (event.target.matches("[data-find]")) choose("find", event.target.elements.find.value);
  if (event.target.matches("[data-sql]")) choose("sql", event.target.elements.sql.value);
});
main.addEventListener("change", (event) => {
  if (event.target.matches("select[data-choose]")) choose(event.target.dataset.choose, event.target.value);
  if (event.target.matches("select[data-panel]") && event.target.value) choose("sql", event.target.value);
});
main.addEventListener("input", (event) => {
  if (event.target.matches("input[data-steps]")) step(event.target);
  if (event.target.matches("textarea[data-key]")) mark(event.target);
});

function mark(area) {
  area.closest("li").classList.toggle("changed", area.value !== area.dataset.before);
  main.querySelectorAll("[data-save]").forEach((button) => { button.disabled = !main.querySelector(".changed"); });
}

function enlarge(image) {
  const dialog = document.getElementById("large"), link = dialog.querySelector("a");
  dialog.querySelector("img").src = single ? image.src : image.dataset.full;
  dialog.querySelector("img").alt = image.alt;
  dialog.querySelector("p").textContent = image.alt;
  link.href = single ? image.src : image.dataset.full;
  link.hidden = single;
  dialog.showModal();
}

addEventListener("beforeunload", (event) => { if (main.querySelector(".changed")) event.preventDefault(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts(main));
if (single) { charts(main); sliders(main); } else { show(false).then(poll); }

// Goes from view to view by the address after #, and refreshes the shown view when the run has news.

import { ask, element, plural } from "./dom.js";
import { overview } from "./overview.js";
import { problem, problems } from "./problems.js";
import { group, samples } from "./samples.js";
import { tokens } from "./tokens.js";

const VIEWS = { overview, problems, problem, samples, group, tokens };
const REFRESH_MS = 2000;
const main = document.getElementById("main");
const state = document.getElementById("state");
let refresh = null;
let shown = 0; // counts the views that were opened, so that a late answer to an older one is left out
let due = null;

function place() {
  const [name, ...rest] = location.hash.replace(/^#\//, "").split("/");
  return VIEWS[name] ? [name, rest.map(decodeURIComponent)] : ["overview", []];
}

async function show() {
  const [name, rest] = place();
  const number = ++shown;
  refresh = null;
  const section = { problem: "problems", group: "samples", tokens: "samples" }[name] ?? name;
  for (const link of document.querySelectorAll("header nav a")) {
    if (link.hash === `#/${section}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const holder = element("div");
  main.replaceChildren(holder);
  window.scrollTo(0, 0);
  try {
    const found = await VIEWS[name](holder, rest);
    if (number === shown) refresh = found;
  } catch (error) {
    if (number === shown) holder.replaceChildren(element("p", { class: "reason", role: "alert" }, error.message));
  }
}

async function news() {
  due = null;
  try {
    const told = await ask("following");
    const seen = `${plural(told.trajectories, "graded completion")} seen`;
    state.textContent = told.problem || seen;
    state.classList.toggle("reason", Boolean(told.problem));
    await refresh?.();
  } catch (error) {
    state.textContent = error.message;
  }
}

window.addEventListener("hashchange", show);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
const events = new EventSource("/api/events");
events.onmessage = () => (due ??= setTimeout(news, state.textContent ? REFRESH_MS : 0));
events.onerror = () => (state.textContent = "launch.view does not answer: start it again");
await show();
const told = await ask("overview");
document.getElementById("run").textContent = told.name;
document.title = `${told.name} – kestrel`;

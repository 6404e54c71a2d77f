// All problems in a table, and one problem.

import { chart } from "./charts.js";
import { ask, element, figure, link, percent, plural, visible } from "./dom.js";
import { groupTable } from "./samples.js";

const ROWS = 50;
const COLUMNS = [["problem", "Problem"], ["attempts", "Attempts"], ["pass_rate", "Pass rate"], ["reward", "Reward"], ["tokens", "Tokens"]];

export async function problems(main) {
  const asked = { search: "", sort: "pass_rate", order: "ascending", first: 0 };
  const table = element("div", { class: "wide" });
  const search = element("input", { type: "search", "aria-label": "Search problems", placeholder: "Search in names and texts" });
  search.addEventListener("input", () => again({ search: search.value, first: 0 }));
  main.replaceChildren(element("h1", {}, "Problems"), search, table);

  async function refresh() {
    const question = { ...asked };
    const found = await ask("problems", question);
    if (JSON.stringify(question) !== JSON.stringify(asked)) return; // a newer question is under way
    const focused = document.activeElement?.dataset?.key;
    table.replaceChildren(
      element("p", { class: "faint" }, `${plural(found.count, "problem")} with graded completions, held-out ones included`),
      element("table", {}, element("thead", {}, head()), element("tbody", {}, ...found.rows.map(row))),
      pages(found),
    );
    if (focused) table.querySelector(`[data-key="${focused}"]`)?.focus();
  }

  function again(changed) {
    Object.assign(asked, changed);
    return refresh();
  }

  function head() {
    const cells = COLUMNS.map(([key, title]) => {
      const sorted = asked.sort === key;
      const order = sorted && asked.order === "ascending" ? "descending" : "ascending";
      const mark = sorted ? (asked.order === "ascending" ? " ▲" : " ▼") : "";
      const button = element("button", { type: "button", "data-key": key, onclick: () => again({ sort: key, order, first: 0 }) }, title + mark);
      return element("th", { "aria-sort": sorted ? asked.order : "none" }, button);
    });
    return element("tr", {}, ...cells, element("th", {}, "Best"), element("th", {}, "Worst"));
  }

  function pages(found) {
    const to = Math.min(found.first + ROWS, found.count);
    return element(
      "p",
      { class: "pages" },
      element("button", { type: "button", "data-key": "before", disabled: found.first === 0, onclick: () => again({ first: found.first - ROWS }) }, "Before"),
      ` ${found.count ? found.first + 1 : 0} to ${to} of ${found.count.toLocaleString("en")} `,
      element("button", { type: "button", "data-key": "after", disabled: to >= found.count, onclick: () => again({ first: found.first + ROWS }) }, "After"),
    );
  }

  await refresh();
  return refresh;
}

const sampleLink = (reward, group, number) => link(`#/tokens/${group}/${number}`, figure(reward), { "aria-label": `sample with reward ${figure(reward)}` });

function row(found) {
  return element(
    "tr",
    {},
    element("td", { class: "text" }, link(`#/problem/${encodeURIComponent(found.id)}`, visible(found.id)), element("div", { class: "faint clipped" }, visible(found.text))),
    element("td", {}, figure(found.attempts)),
    element("td", {}, percent(found.pass_rate)),
    element("td", {}, figure(found.reward)),
    element("td", {}, figure(found.tokens)),
    element("td", {}, sampleLink(found.best, found.best_group, found.best_number)),
    element("td", {}, sampleLink(found.worst, found.worst_group, found.worst_number)),
  );
}

export async function problem(main, [id]) {
  const page = element("div");
  main.replaceChildren(page);
  async function refresh() {
    const told = await ask("problem", { id });
    const reasons = Object.entries(told.reasons);
    page.replaceChildren(
      element("h1", {}, visible(id)),
      element("pre", { class: "model" }, visible(told.row.text)),
      element("p", {}, `${plural(told.row.attempts, "attempt")}, pass rate ${percent(told.row.pass_rate)}, mean length ${figure(told.row.tokens)} tokens`),
    );
    if (told.pass_rates.length > 1) {
      const holder = element("figure", {}, element("h2", {}, "Pass rate"), element("figcaption", {}, "by the version at which the group was admitted"));
      page.append(holder);
      chart(holder, {
        steps: told.pass_rates.map((at) => at.version),
        lines: [{ name: "pass rate", values: told.pass_rates.map((at) => at.pass_rate) }, { name: "reward", values: told.pass_rates.map((at) => at.reward) }],
      });
    }
    if (reasons.length) {
      const items = reasons.map(([reason, count]) => element("li", {}, `${count} × ${visible(reason)}`));
      page.append(element("h2", {}, "Why it did not get the full reward"), element("ul", { class: "model" }, ...items));
    }
    page.append(element("h2", {}, "Groups"), groupTable(told.groups));
  }
  await refresh();
  return refresh;
}

// The groups of a step, and the completions of one group side by side.

import { ask, element, figure, link, plural, visible } from "./dom.js";

export async function samples(main, [chosen]) {
  const page = element("div");
  main.replaceChildren(page);
  async function refresh() {
    const { steps } = await ask("following");
    const step = chosen ? Number(chosen) : steps.at(-1);
    const list = steps.slice(-200).map((at) => link(`#/samples/${at}`, String(at), { "aria-current": at === step ? "page" : null }));
    page.replaceChildren(
      element("h1", {}, step ? `Samples of step ${step}` : "Samples"),
      element("p", { class: "faint" }, "The ledger keeps the batches since its oldest checkpoint; older ones are listed while this page has seen them."),
      element("nav", { class: "steps", "aria-label": "Steps" }, ...list),
      step ? groupTable(await ask("groups", { step })) : element("p", {}, "No batch has been taken yet."),
    );
  }
  await refresh();
  return chosen ? null : refresh;
}

export function groupTable(groups) {
  const head = ["Group", "Problem", "Step", "Admitted at version", "Graded", "Mean reward"].map((title) => element("th", { class: title === "Problem" ? "text" : null }, title));
  return element("div", { class: "wide" }, element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...groups.map(groupRow))));
}

function groupRow(group) {
  const trained = group.dropped ? `dropped: ${visible(group.dropped)}` : group.eval_id ? "evaluation" : figure(group.step);
  return element(
    "tr",
    {},
    element("td", {}, link(`#/group/${group.id}`, String(group.id))),
    element("td", { class: "text" }, link(`#/problem/${encodeURIComponent(group.problem)}`, visible(group.problem))),
    element("td", {}, trained),
    element("td", {}, figure(group.version)),
    element("td", {}, `${group.graded} of ${group.completions}`),
    element("td", {}, figure(group.reward)),
  );
}

export async function group(main, [index]) {
  const page = element("div");
  main.replaceChildren(page);
  let done = false;
  async function refresh() {
    if (done) return;
    const { row, page: told } = await ask("group", { group: index });
    done = row.graded === row.completions;
    page.replaceChildren(
      element("h1", {}, `Group ${index}`),
      element("p", {}, "Problem ", link(`#/problem/${encodeURIComponent(told.problem)}`, visible(told.problem)), place(row)),
      element("h2", {}, `Prompt, ${plural(told.prompt_tokens, "token")}`),
      element("pre", { class: "model" }, visible(told.prompt)),
      element("h2", {}, `${plural(told.samples.length, "completion")}`),
      element("div", { class: "samples" }, ...told.samples.map((sample) => card(index, sample))),
    );
  }
  await refresh();
  return refresh;
}

function place(row) {
  if (row.step !== null) return `, trained in step ${row.step}, mean reward ${figure(row.reward)}`;
  return row.eval_id ? ", of an evaluation" : ", not trained on yet";
}

function card(index, sample) {
  const cut = sample.characters - sample.text.length;
  const parts = Object.entries(sample.parts).map(([name, value]) => element("li", {}, `${visible(name)} ${figure(value)}`));
  return element(
    "article",
    {},
    element("h3", {}, link(`#/tokens/${index}/${sample.number}`, `Completion ${sample.number}`), verdict(sample)),
    element("p", { class: "faint" }, facts(sample)),
    sample.reason ? element("p", { class: "reason model" }, visible(sample.reason)) : null,
    parts.length ? element("ul", { class: "parts" }, ...parts) : null,
    element("pre", { class: "model completion", tabindex: 0 }, visible(sample.text)),
    cut > 0 ? element("p", { class: "faint" }, `${plural(cut, "more character")}: `, link(`#/tokens/${index}/${sample.number}`, "all of it, token by token")) : null,
  );
}

export function verdict(sample) {
  if (sample.reward === null) return element("span", { class: "badge" }, "not graded yet");
  return element("span", { class: sample.reward >= 1 ? "badge good" : sample.reward > 0 ? "badge" : "badge bad" }, `reward ${figure(sample.reward)}`);
}

export function facts(sample) {
  const versions = sample.versions && (sample.versions[0] === sample.versions[1] ? `version ${sample.versions[0]}` : `versions ${sample.versions[0]} to ${sample.versions[1]}`);
  const ends = { stop: "stopped", length: "cut at the cap", cut: "goes on" }[sample.finish];
  const turns = sample.turns > 1 ? plural(sample.turns, "turn") : null;
  return [plural(sample.sampled, "sampled token"), plural(sample.segments, "segment"), turns, versions, ends].filter(Boolean).join(" · ");
}

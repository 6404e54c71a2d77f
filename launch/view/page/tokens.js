// One completion, token by token, each token coloured by what the ledger knows about it.

import { seriesColour } from "./charts.js";
import { ask, element, figure, link, plural, visible } from "./dom.js";
import { facts, verdict } from "./samples.js";

const LOWEST = -5; // log-probs below it have the full colour
const AT_ONCE = 4000; // tokens that are laid out before the browser may answer again

export async function tokens(main, [index, number]) {
  const { row, page: told } = await ask("tokens", { group: index, number });
  const text = element("div", { class: "tokens model", tabindex: 0, role: "group", "aria-label": "Tokens; the arrow keys go from token to token" });
  const detail = element("p", { class: "detail", role: "status" }, "Point at a token, or move with the arrow keys.");
  const legend = element("p", { class: "legend" });
  const choice = element("select", { id: "by" }, ...Object.entries(KINDS).map(([key, kind]) => element("option", { value: key }, kind.title)));
  main.replaceChildren(
    element("h1", {}, `Completion ${number} of `, link(`#/group/${index}`, `group ${index}`)),
    element("p", {}, verdict(told.sample), ` ${facts(told.sample)}`, row.step === null ? "" : ` · trained in step ${row.step}`),
    told.sample.reason ? element("p", { class: "reason model" }, visible(told.sample.reason)) : "",
    element("div", { class: "bar" }, element("label", { for: "by" }, "Colour by "), choice, legend, detail),
    text,
  );
  const spans = new Array(told.ids.length);
  const paint = () => {
    const kind = KINDS[choice.value];
    const scale = kind.scale(told);
    spans.forEach((span, at) => (span.style.backgroundColor = told.versions[at] === null ? "" : scale.colour(at)));
    legend.replaceChildren(...scale.legend.map(([colour, name]) => key(colour, name)));
  };
  choice.addEventListener("change", paint);
  follow(text, detail, told, spans);
  await layOut(text, told, spans);
  paint();
  return null;
}

const KINDS = {
  logprob: {
    title: "log-prob when sampled",
    scale: (told) => {
      const colour = (share) => `rgb(220 38 38 / ${(0.75 * share).toFixed(3)})`;
      return {
        colour: (at) => colour(Math.min(1, told.logprobs[at] / LOWEST)),
        legend: [[colour(0.05), "certain"], [colour(0.4), `${0.4 * LOWEST}`], [colour(1), `${LOWEST} or less`]],
      };
    },
  },
  version: {
    title: "version",
    scale: (told) => byValue(told.versions, (version) => `version ${version}`),
  },
  lag: {
    title: "lag when trained on",
    scale: (told) => {
      if (told.lags.every((lag) => lag === null)) return { colour: () => "", legend: [["", "not trained on yet"]] };
      return byValue(told.lags, (lag) => `lag ${lag}`);
    },
  },
};

function byValue(values, name) {
  const found = [...new Set(values.filter((value) => value !== null))].sort((a, b) => a - b);
  const colours = new Map(found.map((value, at) => [value, `color-mix(in srgb, ${seriesColour(at)} 40%, transparent)`]));
  const legend = found.slice(0, 12).map((value) => [colours.get(value), name(value)]);
  return { colour: (at) => colours.get(values[at]), legend };
}

function key(colour, name) {
  const patch = element("span", { class: "patch" });
  patch.style.backgroundColor = colour;
  return element("span", { class: "key" }, patch, name);
}

async function layOut(text, told, spans) {
  for (const part of told.parts) {
    const holder = element("span", { class: part.kind });
    holder.append(element("span", { class: "mark" }, markOf(part)));
    text.append(holder);
    for (let at = part.begin; at < part.end; at++) {
      spans[at] = element("span", { class: "token", "data-at": at }, shown(told.texts[at]));
      holder.append(spans[at]);
      if (at % AT_ONCE === AT_ONCE - 1) await new Promise((resolve) => setTimeout(resolve));
    }
  }
}

function markOf(part) {
  const size = plural(part.end - part.begin, "token");
  if (part.kind === "prompt") return `prompt, ${size}`;
  if (part.kind === "observation") return `observation, ${size}, not sampled`;
  const ends = { stop: "stopped", length: "cut at the cap", cut: "cut: goes on" }[part.finish];
  return `segment, ${size}, ${visible(part.engine)}, ${ends}`;
}

const shown = (text) => (text === "" ? "·" : visible(text).replaceAll("\n", "↵\n"));

function follow(text, detail, told, spans) {
  let chosen = -1;
  const choose = (at) => {
    spans[chosen]?.classList.remove("chosen");
    chosen = at;
    spans[at].classList.add("chosen");
    detail.textContent = about(told, at);
  };
  text.addEventListener("pointerover", (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) choose(Number(at));
  });
  text.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(told.ids.length - 1, chosen + move)));
    spans[chosen].scrollIntoView({ block: "nearest" });
  });
}

function about(told, at) {
  const part = told.parts.find((found) => found.begin <= at && at < found.end);
  const start = `token ${at - told.parts[0].end} · id ${told.ids[at]} · ${JSON.stringify(visible(told.texts[at]))}`;
  if (told.versions[at] === null) return `${start} · ${part.kind}: no policy sampled it`;
  const lag = told.lags[at] === null ? "" : ` · lag ${told.lags[at]}`;
  const chance = figure(100 * Math.exp(told.logprobs[at]));
  return `${start} · version ${told.versions[at]}${lag} · log-prob ${figure(told.logprobs[at])} (${chance}%) · ${visible(part.engine)}`;
}

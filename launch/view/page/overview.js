// The first page: facts, charts, and the run's configuration.

import { chart } from "./charts.js";
import { ask, element } from "./dom.js";

export async function overview(main) {
  const page = element("div");
  main.replaceChildren(page);
  let shown = "";
  async function refresh() {
    const told = await ask("overview");
    if (JSON.stringify(told) === shown) return;
    shown = JSON.stringify(told);
    const open = page.querySelector("details")?.open ?? false;
    const charts = element("div", { class: "charts" });
    page.replaceChildren(
      element("h1", {}, `${told.name}: ${told.steps} steps`),
      element("pre", { class: "facts" }, told.facts.join("\n")),
      charts,
      element("details", { open }, element("summary", {}, "Configuration"), element("pre", {}, told.configuration)),
    );
    for (const data of told.charts) {
      const holder = element("figure", {}, element("h2", {}, data.title), element("figcaption", {}, data.note));
      charts.append(holder);
      chart(holder, data);
    }
  }
  await refresh();
  return refresh;
}

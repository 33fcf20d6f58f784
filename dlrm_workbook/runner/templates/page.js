"use strict";
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Text, background and grid follow the page. They go into the figure's template, so
  // whatever the figure itself sets still wins; traces keep their colours.
  function dress(figure) {
    const text = colour("--text"), grid = colour("--rule"), page = colour("--page");
    const layout = structuredClone(figure.layout || {});
    const swapped = JSON.stringify(layout.template || {})
      .replaceAll('"#2a3f5f"', JSON.stringify(text))
      .replaceAll('"#E5ECF6"', JSON.stringify(page))
      .replaceAll('"#EBF0F8"', JSON.stringify(grid))
      .replaceAll('"#C8D4E3"', JSON.stringify(grid));
    const title = layout.title?.text || (typeof layout.title === "string" && layout.title);
    const template = JSON.parse(swapped);
    const base = template.layout || {};
    const axis = { gridcolor: grid, linecolor: grid, zerolinecolor: grid, automargin: true };
    template.layout = {
      ...base,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      // automargin widens it where labels need room
      margin: base.margin || { l: 56, r: 24, t: title ? 64 : 36, b: 48 },
      font: { ...base.font, color: text, family: colour("--sans") },
      xaxis: { ...base.xaxis, ...axis },
      yaxis: { ...base.yaxis, ...axis },
    };
    layout.template = template;
    layout.autosize = true;
    delete layout.width; // the window decides
    return layout;
  }

  const plots = [];

  function draw(holder) {
    const place = holder.querySelector(".plot");
    const figure = JSON.parse(holder.querySelector("script").textContent);
    const config = { responsive: true, displaylogo: false };
    const layout = dress(figure);
    plots.push({ place, figure, config });
    return Plotly.newPlot(place, { data: figure.data, layout, config, frames: figure.frames });
  }

  for (const holder of document.querySelectorAll("figure")) {
    if (!holder.querySelector(".plot")) continue;
    // one figure that cannot be drawn must not take the others with it
    try {
      draw(holder);
    } catch (error) {
      holder.querySelector(".plot").textContent = `This figure could not be drawn: ${error}`;
      console.error(error);
    }
  }
  dark.addEventListener("change", () => {
    for (const { place, figure, config } of plots) {
      Plotly.react(place, structuredClone(figure.data), dress(figure), config);
    }
  });

  const codes = [...document.querySelectorAll("details.code")];
  const all = document.getElementById("all-code");
  if (codes.length) {
    all.hidden = false;
    all.addEventListener("click", () => {
      const open = codes.some((code) => !code.open);
      for (const code of codes) code.open = open;
      all.textContent = open ? "Hide all code" : "Show all code";
    });
  }
  // on a narrow screen contents and parameters would push the report off the first view
  if (window.matchMedia("(max-width: 68rem)").matches) {
    document.querySelector(".contents details")?.removeAttribute("open");
    document.querySelector("details.parameters")?.removeAttribute("open");
  }
})();

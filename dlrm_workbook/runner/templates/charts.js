"use strict";
// Draws the page's figures: in the page's colours, fitted to the window, and sending nothing.
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const CONFIG = {
    responsive: true, displaylogo: false, plotlyServerURL: "",
    showSendToCloud: false, showEditInChartStudio: false,
    modeBarButtonsToRemove: ["sendChartToCloud", "select2d", "lasso2d"],
  };

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

  const drawn = new Map(); // place to its figure

  function draw(place) {
    const figure = JSON.parse(place.parentElement.querySelector("script").textContent);
    drawn.set(place, figure);
    return Plotly.newPlot(place, {
      data: figure.data, layout: dress(figure), config: CONFIG, frames: figure.frames,
    });
  }

  // what is folded away has no width to be drawn in
  function drawVisible() {
    for (const place of document.querySelectorAll("figure .plot")) {
      if (drawn.has(place) || !place.checkVisibility()) continue;
      // one figure that cannot be drawn must not take the others with it
      try {
        draw(place);
      } catch (error) {
        place.textContent = `This figure could not be drawn: ${error}`;
        console.error(error);
      }
    }
  }
  drawVisible();
  document.addEventListener("toggle", drawVisible, true);
  dark.addEventListener("change", () => {
    for (const [place, figure] of drawn) {
      Plotly.react(place, structuredClone(figure.data), dress(figure), CONFIG);
    }
  });
})();

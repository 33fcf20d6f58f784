"use strict";
(() => {
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

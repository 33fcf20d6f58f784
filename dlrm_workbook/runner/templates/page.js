"use strict";
// Shows code, and opens what is folded for links and on wide screens.
(() => {
  const code = document.getElementById("show-code");
  const showCode = () => document.body.classList.toggle("with-code", code.checked);
  if (code) showCode();
  code?.addEventListener("change", showCode);

  const target = () => document.getElementById(decodeURIComponent(location.hash.slice(1)));

  function reveal(element) {
    for (let at = element?.closest("details"); at; at = at.parentElement.closest("details")) {
      at.open = true;
    }
  }
  function follow() {
    const element = target();
    reveal(element);
    element?.scrollIntoView();
  }
  if (target()?.closest("details")) follow();
  addEventListener("hashchange", follow);
  // a link to where the reader is already changes no address
  document.addEventListener("click", (event) => {
    const address = event.target.closest?.("a")?.getAttribute("href") || "";
    if (address.startsWith("#") && address === location.hash) follow();
  });

  // on a narrow screen the contents would push the report off the first view
  if (matchMedia("(max-width: 68rem)").matches) {
    document.querySelector(".contents details")?.removeAttribute("open");
  }
})();

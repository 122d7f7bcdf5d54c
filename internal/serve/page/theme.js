// Chooses dark or light before the page is drawn. This is no module, as those run after that.
(() => {
  "use strict";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => {
    try {
      return localStorage.getItem("shapectl-theme");
    } catch {
      return null; // storage may be forbidden
    }
  };
  let chosen = kept();
  const show = () => {
    const theme = chosen ?? (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    document.dispatchEvent(new CustomEvent("theme", { detail: theme }));
  };
  dark.addEventListener("change", show);
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => {
      const other = document.documentElement.dataset.theme === "dark" ? "Light" : "Dark";
      button.setAttribute("aria-label", `${other} colours`);
      button.title = `${other} colours`;
    };
    button?.addEventListener("click", () => {
      chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      try {
        // What the system chooses anyway needs no memory, so that the page follows it again.
        if ((chosen === "dark") === dark.matches) localStorage.removeItem("shapectl-theme");
        else localStorage.setItem("shapectl-theme", chosen);
      } catch { /* then it lasts as long as the page */ }
      show();
      label();
    });
    if (button) label();
  });
  show();
})();

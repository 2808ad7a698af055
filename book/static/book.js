// What scrolls can be scrolled by the keyboard in every browser; what does not is no stop of the tabulator.
function reachable() {
  for (const box of document.querySelectorAll("pre, div.math, .table-wrapper")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
addEventListener("load", reachable);
addEventListener("resize", reachable);

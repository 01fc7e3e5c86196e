"use strict";
// Copies the text of an element; *button* says whether that worked.
async function copyText(element, button) {
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(element.textContent);
  } catch {  // the clipboard needs https or a local address
    getSelection().selectAllChildren(element);
    isCopied = document.execCommand("copy");
  }
  $("copied").textContent = button.textContent = isCopied ? "Copied" : "Press Ctrl+C";
  setTimeout(() => { button.textContent = "Copy"; $("copied").textContent = ""; }, 2000);
}

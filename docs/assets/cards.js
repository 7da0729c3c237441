// On a phone a table of more than three columns is a card for each row, in site.css: each cell gets the name of its column.
document.querySelectorAll("article table:not([class])").forEach((table) => {
  const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
  if (names.length < 4) return;
  table.dataset.cards = "";
  table.querySelectorAll("tbody tr").forEach((row) =>
    [...row.cells].forEach((cell, column) => { cell.dataset.name = names[column] || ""; }));
});

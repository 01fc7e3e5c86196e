"""The figures of docs/figures.md: what is measured, part by part, and the page that shows it."""

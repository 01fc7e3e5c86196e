// Codex: a task in a folder, by `codex exec`, against templates that lose system turns.

// /// script
// dependencies = ["@openai/codex@0.169.0"]
// ///

import { pageSettings, runAgent, tryAgent, writeSettings } from "./agent_task.mjs";

// A key of the top level comes before all tables, and a table after them.
const settings = (root) =>
  `check_for_update_on_startup = false\n${pageSettings("Codex", "toml", root)}\n[analytics]\nenabled = false\n`;

function run(home, ...words) {
  const flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"];
  return runAgent("codex", ["exec", ...words.slice(0, -1), ...flags, words.at(-1)], home);
}

tryAgent({
  client: "Codex",
  packageName: "@openai/codex",
  what: "`codex exec` changes a file, then a resumed session",
  prepare: (root, home) => writeSettings(home, ".codex/config.toml", settings(root)),
  ask: (root, home, prompt) => run(home, prompt),
  resume: (root, home, prompt) => run(home, "resume", "--last", prompt),
});

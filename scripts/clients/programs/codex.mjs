// Codex: a task in a folder, by `codex exec`, against templates that lose system turns.

// /// script
// dependencies = ["@openai/codex@0.169.0"]
// ///

import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { runAgent, tryAgent } from "./agent_task.mjs";

function settings(root) {
  return `model = "tiny"
model_provider = "saccade"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.saccade]
name = "Saccade"
base_url = "${root}/v1"
wire_api = "responses"
`;
}

function run(home, ...words) {
  const flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"];
  return runAgent("codex", ["exec", ...words.slice(0, -1), ...flags, words.at(-1)], home, { CODEX_HOME: home });
}

tryAgent({
  client: "Codex",
  packageName: "@openai/codex",
  what: "`codex exec` changes a file, then a resumed session",
  prepare: (root, home) => writeFileSync(join(home, "config.toml"), settings(root)),
  ask: (root, home, prompt) => run(home, prompt),
  resume: (root, home, prompt) => run(home, "resume", "--last", prompt),
});

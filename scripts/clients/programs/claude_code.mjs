// Claude Code: a task in a folder, by `claude -p`, against templates that lose system turns.

// /// script
// dependencies = ["@anthropic-ai/claude-code@2.1.328"]
// ///

import { pageVariables, runAgent, tryAgent } from "./agent_task.mjs";

function run(root, home, ...words) {
  const flags = ["--permission-mode", "acceptEdits"];
  return runAgent("claude", [...flags, "-p", ...words], home, pageVariables("Claude Code", root));
}

tryAgent({
  client: "Claude Code",
  packageName: "@anthropic-ai/claude-code",
  what: "`claude -p` changes a file, then a continued session",
  ask: run,
  resume: (root, home, prompt) => run(root, home, prompt, "--continue"),
});

// Claude Code: a task in a folder, by `claude -p`, against templates that lose system turns.

// /// script
// dependencies = ["@anthropic-ai/claude-code@2.1.328"]
// ///

import { runAgent, tryAgent } from "./agent_task.mjs";

function run(root, home, ...words) {
  return runAgent("claude", ["--permission-mode", "acceptEdits", "-p", ...words], home, {
    ANTHROPIC_BASE_URL: root,
    ANTHROPIC_AUTH_TOKEN: "none",
    ANTHROPIC_MODEL: "tiny",
    ANTHROPIC_SMALL_FAST_MODEL: "tiny",
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  });
}

tryAgent({
  client: "Claude Code",
  packageName: "@anthropic-ai/claude-code",
  what: "`claude -p` changes a file, then a continued session",
  ask: run,
  resume: (root, home, prompt) => run(root, home, prompt, "--continue"),
});

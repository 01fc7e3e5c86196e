// Qwen Code: a task in a folder, by `qwen -p`, against templates that lose system turns.

// /// script
// dependencies = ["@qwen-code/qwen-code@0.24.4"]
// ///

import { pageSettings, pageVariables, runAgent, tryAgent, writeSettings } from "./agent_task.mjs";

tryAgent({
  client: "Qwen Code",
  packageName: "@qwen-code/qwen-code",
  what: "`qwen -p` changes a file",
  prepare: (root, home) => writeSettings(home, ".qwen/settings.json", pageSettings("Qwen Code", "json", root)),
  ask: (root, home, prompt) =>
    runAgent("qwen", ["--auth-type", "openai", "--yolo", "-p", prompt], home, {
      QWEN_TELEMETRY_ENABLED: "false",
      ...pageVariables("Qwen Code", root),
    }),
});

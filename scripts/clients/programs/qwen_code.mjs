// Qwen Code: a task in a folder, by `qwen -p`, against templates that lose system turns.

// /// script
// dependencies = ["@qwen-code/qwen-code@0.24.4"]
// ///

import { runAgent, tryAgent } from "./agent_task.mjs";

tryAgent({
  client: "Qwen Code",
  packageName: "@qwen-code/qwen-code",
  what: "`qwen -p` changes a file",
  ask: (root, home, prompt) =>
    runAgent("qwen", ["--auth-type", "openai", "--yolo", "-p", prompt], home, {
      QWEN_TELEMETRY_ENABLED: "false",
      OPENAI_BASE_URL: `${root}/v1`,
      OPENAI_API_KEY: "none",
      OPENAI_MODEL: "tiny",
    }),
});

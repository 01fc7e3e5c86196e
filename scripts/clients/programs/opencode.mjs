// opencode: a task in a folder, by `opencode run`, against templates that lose system turns.

// /// script
// dependencies = ["opencode-ai@1.18.33"]
// ///

import { pageSettings, runAgent, tryAgent, writeSettings } from "./agent_task.mjs";

// Its list of models and its updates come from other hosts.
const WITHOUT_NETWORK = { OPENCODE_DISABLE_AUTOUPDATE: "1", OPENCODE_DISABLE_MODELS_FETCH: "1" };

tryAgent({
  client: "opencode",
  packageName: "opencode-ai",
  what: "`opencode run` changes a file, then a continued session",
  prepare: (root, home) =>
    writeSettings(home, ".config/opencode/opencode.json", pageSettings("opencode", "json", root)),
  ask: (root, home, prompt) => runAgent("opencode", ["run", prompt], home, WITHOUT_NETWORK),
  resume: (root, home, prompt) => runAgent("opencode", ["run", "--continue", prompt], home, WITHOUT_NETWORK),
});

// Cline: a task in a folder, by its command line, against templates that lose system turns.

// /// script
// dependencies = ["cline@3.0.65"]
// ///

import { join } from "node:path";
import { pageSettings, runAgent, tryAgent, writeSettings } from "./agent_task.mjs";

function run(home, words) {
  return runAgent("cline", words, home, {
    CLINE_GLOBAL_SETTINGS_PATH: join(home, "quiet.json"),
    CLINE_SESSION_BACKEND_MODE: "local", // else a second program stays in the background
  });
}

function signIn(root, home) {
  writeSettings(home, "quiet.json", JSON.stringify({ telemetryOptOut: true, autoUpdateEnabled: false }));
  run(home, pageSettings("Cline", "bash", root).trim().split(" ").slice(1));
}

tryAgent({
  client: "Cline",
  packageName: "cline",
  what: "`cline` changes a file",
  prepare: signIn,
  ask: (root, home, prompt) => run(home, [prompt]),
});

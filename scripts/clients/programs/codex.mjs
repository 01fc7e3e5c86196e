// Codex: a task in a folder, by `codex exec`, against templates that lose system turns.

// /// script
// dependencies = ["@openai/codex@0.169.0"]
// ///

import { spawnSync } from "node:child_process";
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

// Whatever it asks of other hosts meets no proxy.
const LOOPBACK_ONLY = { HTTP_PROXY: "http://127.0.0.1:9", HTTPS_PROXY: "http://127.0.0.1:9", NO_PROXY: "127.0.0.1" };
const { AGENT_FOLDER, AGENT_BEFORE, AGENT_AFTER, AGENT_SAYS, IMAGE, PATH } = process.env;
const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const version = JSON.parse(readFileSync(here("node_modules/@openai/codex/package.json"))).version;
const codex = here("node_modules/.bin/codex");

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
  const env = { PATH, HOME: home, CODEX_HOME: home, ...LOOPBACK_ONLY };
  const flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"];
  const done = spawnSync(codex, ["exec", ...words.slice(0, -1), ...flags, words.at(-1)], {
    cwd: AGENT_FOLDER, env, input: "", encoding: "utf8", timeout: 240_000,
  });
  if (done.status !== 0) throw new Error(`exit code ${done.status}: ${done.stderr.slice(-200)}`);
  return done.stdout;
}

function task(root) {
  const home = mkdtempSync(join(tmpdir(), "codex-"));
  writeFileSync(join(home, "config.toml"), settings(root));
  writeFileSync(join(AGENT_FOLDER, "notes.txt"), AGENT_BEFORE);
  copyFileSync(IMAGE, join(AGENT_FOLDER, "image.png"));
  const said = run(home, "Look at image.png, and paint the door of notes.txt green.");
  const file = readFileSync(join(AGENT_FOLDER, "notes.txt"), "utf8");
  if (file !== AGENT_AFTER) throw new Error(`the file says ${file}`);
  if (!said.includes(AGENT_SAYS)) throw new Error(`it says ${said}`);
  const again = run(home, "resume", "--last", "Is it green?");
  if (!again.includes(AGENT_SAYS)) throw new Error(`the resumed session says ${again}`);
}

const attempts = {
  "`codex exec` changes a file, then a resumed session, Qwen3-VL's template": process.env.AGENT_QWEN3_VL_ROOT,
  "the same, Qwen3.5's template": process.env.AGENT_QWEN3_5_ROOT,
  "the same, Gemma 4's template": process.env.AGENT_GEMMA4_ROOT,
};
mkdirSync(AGENT_FOLDER, { recursive: true });
for (const [what, root] of Object.entries(attempts)) {
  let detail = "";
  try {
    task(root);
  } catch (failure) {
    console.error(failure);
    detail = `${failure.name}: ${failure.message}`.slice(0, 300);
  }
  console.log(JSON.stringify({ client: "Codex", version, what, ok: !detail, detail }));
}

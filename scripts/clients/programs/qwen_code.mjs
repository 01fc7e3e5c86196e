// Qwen Code: a task in a folder, by `qwen -p`, against templates that lose system turns.

// /// script
// dependencies = ["@qwen-code/qwen-code@0.24.4"]
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
const version = JSON.parse(readFileSync(here("node_modules/@qwen-code/qwen-code/package.json"))).version;
const qwen = here("node_modules/.bin/qwen");

function run(root, home, prompt) {
  const settings = { OPENAI_BASE_URL: `${root}/v1`, OPENAI_API_KEY: "none", OPENAI_MODEL: "tiny" };
  const env = { PATH, HOME: home, QWEN_TELEMETRY_ENABLED: "false", ...LOOPBACK_ONLY, ...settings };
  const done = spawnSync(qwen, ["--auth-type", "openai", "--yolo", "-p", prompt], {
    cwd: AGENT_FOLDER, env, input: "", encoding: "utf8", timeout: 240_000,
  });
  if (done.status !== 0) throw new Error(`exit code ${done.status}: ${(done.stderr + done.stdout).slice(-200)}`);
  return done.stdout;
}

function task(root) {
  const home = mkdtempSync(join(tmpdir(), "qwen-"));
  writeFileSync(join(AGENT_FOLDER, "notes.txt"), AGENT_BEFORE);
  copyFileSync(IMAGE, join(AGENT_FOLDER, "image.png"));
  const said = run(root, home, "Look at image.png, and paint the door of notes.txt green.");
  const file = readFileSync(join(AGENT_FOLDER, "notes.txt"), "utf8");
  if (file !== AGENT_AFTER) throw new Error(`the file says ${file}`);
  if (!said.includes(AGENT_SAYS)) throw new Error(`it says ${said}`);
}

const attempts = {
  "`qwen -p` changes a file, Qwen3-VL's template": process.env.AGENT_QWEN3_VL_ROOT,
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
  console.log(JSON.stringify({ client: "Qwen Code", version, what, ok: !detail, detail }));
}

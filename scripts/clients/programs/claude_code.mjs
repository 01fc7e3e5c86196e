// Claude Code: a task in a folder, by `claude -p`, against templates that lose system turns.

// /// script
// dependencies = ["@anthropic-ai/claude-code@2.1.328"]
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
const version = JSON.parse(readFileSync(here("node_modules/@anthropic-ai/claude-code/package.json"))).version;
const claude = here("node_modules/.bin/claude");

function settings(root) {
  return {
    ANTHROPIC_BASE_URL: root,
    ANTHROPIC_AUTH_TOKEN: "none",
    ANTHROPIC_MODEL: "tiny",
    ANTHROPIC_SMALL_FAST_MODEL: "tiny",
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  };
}

function run(root, home, ...words) {
  const env = { PATH, HOME: home, ...LOOPBACK_ONLY, ...settings(root) };
  const flags = ["--permission-mode", "acceptEdits"];
  const done = spawnSync(claude, [...flags, "-p", ...words], {
    cwd: AGENT_FOLDER, env, input: "", encoding: "utf8", timeout: 240_000,
  });
  if (done.status !== 0) throw new Error(`exit code ${done.status}: ${(done.stderr + done.stdout).slice(-200)}`);
  return done.stdout;
}

function task(root) {
  const home = mkdtempSync(join(tmpdir(), "claude-"));
  writeFileSync(join(AGENT_FOLDER, "notes.txt"), AGENT_BEFORE);
  copyFileSync(IMAGE, join(AGENT_FOLDER, "image.png"));
  const said = run(root, home, "Look at image.png, and paint the door of notes.txt green.");
  const file = readFileSync(join(AGENT_FOLDER, "notes.txt"), "utf8");
  if (file !== AGENT_AFTER) throw new Error(`the file says ${file}`);
  if (!said.includes(AGENT_SAYS)) throw new Error(`it says ${said}`);
  const again = run(root, home, "Is it green?", "--continue");
  if (!again.includes(AGENT_SAYS)) throw new Error(`the resumed session says ${again}`);
}

const attempts = {
  "`claude -p` changes a file, then a continued session, Qwen3-VL's template": process.env.AGENT_QWEN3_VL_ROOT,
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
  console.log(JSON.stringify({ client: "Claude Code", version, what, ok: !detail, detail }));
}

// The task that a coding agent's program has it do, once for each chat template, and the rows of its results.

import { spawnSync } from "node:child_process";
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

// Whatever an agent asks of other hosts meets no proxy.
const LOOPBACK_ONLY = { HTTP_PROXY: "http://127.0.0.1:9", HTTPS_PROXY: "http://127.0.0.1:9", NO_PROXY: "127.0.0.1" };
const { AGENT_FOLDER, AGENT_BEFORE, AGENT_AFTER, AGENT_SAYS, AGENT_PAGE, IMAGE, PATH } = process.env;
const ROOTS = {
  "Qwen3-VL": process.env.AGENT_QWEN3_VL_ROOT,
  "Qwen3.5": process.env.AGENT_QWEN3_5_ROOT,
  "Gemma 4": process.env.AGENT_GEMMA4_ROOT,
};
const PROMPT = "Look at image.png, and paint the door of notes.txt green.";
const QUESTION = "Is it green?";
const SECONDS = 240;

const installed = (path) => fileURLToPath(new URL(`node_modules/${path}`, import.meta.url));

// The settings of an agent as users copy them: the code in *language* below its heading in docs/agents.md, with another
// root and model.
export function pageSettings(heading, language, root) {
  const [, section] = readFileSync(AGENT_PAGE, "utf8").split(`\n## ${heading}\n`);
  const code = section.split("\n## ")[0].split(`\`\`\`${language}\n`)[1].split("```")[0];
  return code.replaceAll("http://127.0.0.1:8000", root).replace(/\bqwen\b/g, "tiny");
}

// The same, if they are variables of the environment: `export NAME=VALUE ...`.
export function pageVariables(heading, root) {
  const lines = pageSettings(heading, "bash", root).matchAll(/^export (.+)$/gm);
  return Object.fromEntries([...lines].flatMap(([, line]) => line.split(" ").map((one) => one.split("="))));
}

// Writes settings into a file below the user's folder.
export function writeSettings(home, path, text) {
  mkdirSync(dirname(join(home, path)), { recursive: true });
  writeFileSync(join(home, path), text);
}

// Runs an agent's program in the task's folder, with *home* as the user's, and returns what it writes on stdout.
export function runAgent(program, words, home, settings = {}) {
  const done = spawnSync(installed(`.bin/${program}`), words, {
    cwd: AGENT_FOLDER,
    env: { PATH, HOME: home, ...LOOPBACK_ONLY, ...settings },
    input: "",
    encoding: "utf8",
    timeout: SECONDS * 1000,
  });
  if (done.status !== 0) throw new Error(`exit code ${done.status}: ${(done.stderr + done.stdout).slice(-200)}`);
  return done.stdout;
}

function doTask(agent, root) {
  const home = mkdtempSync(join(tmpdir(), "agent-"));
  const file = join(AGENT_FOLDER, "notes.txt");
  writeFileSync(file, AGENT_BEFORE);
  copyFileSync(IMAGE, join(AGENT_FOLDER, "image.png"));
  agent.prepare?.(root, home);
  const said = agent.ask(root, home, PROMPT);
  if (!said.includes(AGENT_SAYS)) throw new Error(`it says ${said}`);
  const found = readFileSync(file, "utf8");
  if (found !== AGENT_AFTER) throw new Error(`the file says ${found}`);
  const again = agent.resume?.(root, home, QUESTION) ?? AGENT_SAYS;
  if (!again.includes(AGENT_SAYS)) throw new Error(`the resumed session says ${again}`);
}

// Prints a row for each template. An agent has the name of its *client*, the name of its *packageName*, and *what* it
// does; `prepare` writes its settings, `ask` gives it the task, and `resume` goes on with that session.
export function tryAgent(agent) {
  const { client, packageName, what } = agent;
  const { version } = JSON.parse(readFileSync(installed(`${packageName}/package.json`)));
  mkdirSync(AGENT_FOLDER, { recursive: true });
  for (const [index, [family, root]] of Object.entries(ROOTS).entries()) {
    let detail = "";
    try {
      doTask(agent, root);
    } catch (failure) {
      console.error(failure);
      detail = `${failure.name}: ${failure.message}`.slice(0, 300);
    }
    const tried = `${index ? "the same" : what}, ${family}'s template`;
    console.log(JSON.stringify({ client, version, what: tried, ok: !detail, detail }));
  }
}

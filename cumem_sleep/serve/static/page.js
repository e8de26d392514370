"use strict";
// Shows the status that the front sends, and makes an operator's calls. All text is set as text, never as HTML.

const HUES = ["#2456a6", "#8a3b12", "#1f6f5c", "#7a2f7d", "#6b5b00", "#a0294f", "#3d4f7c", "#4d6b1a"];
const RESTS = new Set(["asleep", "stopped"]);
const LONGEST_PAUSE_MS = 10000;
const STORED = "cumem-sleep-token";

const byId = (id) => document.getElementById(id);
let token = tokenOfLink() || sessionStorage.getItem(STORED) || "";
let reading = null; // the stream's AbortController
let pauseMs = 0;
let last = null; // the status that is shown
let skewS = 0; // of the server's clock

function element(name, classes, text) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
}

function bytes(count) {
  if (count === null || count === undefined) return "unknown";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

function seconds(count) {
  if (count < 1) return `${Math.round(count * 1000)} ms`;
  return count < 100 ? `${count.toFixed(count < 10 ? 2 : 1)} s` : `${Math.round(count)} s`;
}

function ago(at) {
  const gone = Math.max(0, Date.now() / 1000 - skewS - at);
  if (gone < 60) return `${Math.floor(gone)} s ago`;
  if (gone < 3600) return `${Math.floor(gone / 60)} min ago`;
  return gone < 86400 ? `${Math.floor(gone / 3600)} h ago` : `${Math.floor(gone / 86400)} d ago`;
}

// What is shown

// A bar, and below it whose its pieces are: there names have room. `nobody`: what is said where there are none.
function bar(parts, label, nobody) {
  const made = element("div", "bar");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", label);
  const names = element("div", "names");
  for (const part of parts) {
    const piece = element("span", part.busy ? "busy" : "");
    piece.style.width = `${Math.max(0, Math.min(1, part.share)) * 100}%`;
    piece.title = part.text;
    const name = element("span", "", part.text);
    for (const each of [piece, name]) each.style.setProperty("--hue", part.hue);
    made.append(piece);
    names.append(name);
  }
  if (!parts.length) names.append(element("span", "nobody", nobody));
  const both = element("div");
  both.append(made, names);
  return both;
}

function hueOf(status, name) {
  return HUES[Math.max(0, status.models.findIndex((model) => model.name === name)) % HUES.length];
}

function gpuCard(status, gpu) {
  const card = element("li");
  const head = element("div", "head");
  head.append(element("h3", "", `GPU ${gpu.gpu}`), element("span", "", gpu.name || ""));
  const used = gpu.total_bytes === null ? "" : `${bytes(gpu.used_bytes)} of ${bytes(gpu.total_bytes)} in use`;
  head.append(element("span", "dim", used));
  const parts = gpu.holders.map((holder) => ({
    share: holder.share,
    text: holder.phase === "awake" ? holder.model : `${holder.model} (${holder.phase})`,
    busy: holder.phase !== "awake",
    hue: hueOf(status, holder.model),
  }));
  const said = gpu.holders.map((each) => `${each.model} ${Math.round(each.share * 100)} percent, ${each.phase}`);
  card.append(head, bar(parts, `GPU ${gpu.gpu}: ${said.join("; ") || "nobody is awake"}`, "nobody is awake"));
  return card;
}

function hostCard(status) {
  const card = element("li");
  const head = element("div", "head");
  const budget = status.host.budget_bytes;
  const rest = status.host.available_bytes === null ? "" : `, ${bytes(status.host.available_bytes)} available`;
  const kept = status.host.kept_bytes ? `, ${bytes(status.host.kept_bytes)} of KV cache kept` : "";
  const held = `${bytes(status.host.held_bytes)} of ${bytes(budget)} held by sleepers${kept}`;
  head.append(element("h3", "", "Host memory"), element("span", "dim", held + rest));
  const holders = status.models.filter((model) => model.host_bytes + model.kept_bytes > 0 && !model.in_vault);
  const parts = partsOf(status, holders, (model) => (budget ? (model.host_bytes + model.kept_bytes) / budget : 0));
  card.append(head, bar(parts, `Host memory: ${held}`, "nobody sleeps here"));
  return card;
}

// Several models may share what lies there once, so their parts are shares of what is asleep.
function vaultCard(status, vault) {
  const card = element("li");
  const head = element("div", "head");
  const inMemory = vault.asleep_bytes - vault.spilled_bytes;
  const inFiles = vault.spilled_bytes ? `, ${bytes(vault.spilled_bytes)} in files` : "";
  const said = `${bytes(inMemory)} of ${bytes(vault.memory_bytes)} held by sleepers${inFiles}`;
  head.append(element("h3", "", "Vault"), element("span", "dim", `${said}, ${bytes(vault.left_bytes)} left`));
  const holders = status.models.filter((model) => model.host_bytes > 0 && model.in_vault && model.phase === "asleep");
  const all = holders.reduce((sum, model) => sum + model.host_bytes, 0);
  const share = Math.min(all, inMemory) / (all * vault.memory_bytes);
  card.append(head, bar(partsOf(status, holders, (model) => model.host_bytes * share), `Vault: ${said}`, "nobody sleeps here"));
  return card;
}

function partsOf(status, models, share) {
  return models.map((model) => ({
    share: share(model),
    text: model.name,
    busy: false,
    hue: hueOf(status, model.name),
  }));
}

function switchText(done) {
  const words = { sleep: "fell asleep", wake: "woke", start: "started", stop: "stopped" };
  if (done.error) return `${done.kind} failed after ${seconds(done.seconds)}, ${ago(done.ended_at)}`;
  const level = done.level && done.kind === "sleep" ? ` at level ${done.level}` : "";
  return `${words[done.kind] || done.kind}${level} in ${seconds(done.seconds)}, ${ago(done.ended_at)}`;
}

function modelCard(status, model) {
  const card = element("li");
  card.dataset.model = model.name;
  const head = element("div", "head");
  const kind = model.phase === "awake" ? "awake" : RESTS.has(model.phase) ? "rest" : "busy";
  const level = model.phase === "asleep" && model.level ? `, level ${model.level}` : "";
  head.append(element("h3", "", model.name), element("span", `state ${kind}`, model.phase + level));
  head.append(element("span", "dim", model.gpus.length === 1 ? `GPU ${model.gpus[0]}` : `GPUs ${model.gpus.join(", ")}`));
  const facts = element("div", "facts dim");
  const say = (text) => facts.append(element("span", "", text));
  say(model.waiting ? `${model.waiting} waiting, the first for ${seconds(model.oldest_wait_s)}` : "0 waiting");
  say(`${model.running} running`);
  if (model.kept_bytes) say(`keeps ${bytes(model.kept_bytes)} of KV cache`);
  const reading = model.files_s === null ? "" : `, read in ${seconds(model.files_s)}`;
  if (model.files_bytes) say(`${bytes(model.files_bytes)} in files${reading}`);
  if (model.last_switch) {
    const line = element("span", "switch", switchText(model.last_switch));
    facts.append(line);
  }
  if (model.aliases.length) say(`also ${model.aliases.join(", ")}`);
  if (model.restarts) say(`${model.restarts} restarts`);
  if (model.layer === "") say("without cumem-sleep in it");
  if (model.engine === "command") say("without sleep mode: it stops and starts");
  card.append(head, facts);
  if (model.error) {
    const retry = model.retry_in_s === null ? "" : ` (tried again in ${seconds(model.retry_in_s)})`;
    card.append(element("p", "bad", model.error + retry));
    if (model.last_words) card.append(element("p", "bad", model.last_words));
  }
  if (status.operator) card.append(buttons(model));
  return card;
}

// Of a cluster: its models as they are on that node; what is stopped there is left out.
function nodeCard(node) {
  const card = element("li");
  const head = element("div", "head");
  const [kind, state] = node.status === null ? ["rest", "does not answer"] : node.status.draining ? ["busy", "draining"] : ["awake", "up"];
  head.append(element("h3", "", node.name), element("span", `state ${kind}`, state));
  const facts = element("div", "facts dim");
  for (const model of node.status === null ? [] : node.status.models) {
    if (model.phase !== "stopped") facts.append(element("span", "", `${model.name} ${model.phase}, ${model.running} running`));
  }
  card.append(head, facts);
  return card;
}

function buttons(model) {
  const row = element("div", "row");
  const offers = [
    ["wake", "Wake", RESTS.has(model.phase)],
    ["sleep", "Sleep", model.phase === "awake"],
    ["stop", "Stop", model.phase !== "stopped" && model.phase !== "stopping"],
  ];
  for (const [call, text, may] of offers) {
    const button = element("button", "", text);
    button.type = "button";
    button.dataset.call = call;
    button.disabled = !may;
    button.setAttribute("aria-label", `${text} ${model.name}`);
    button.addEventListener("click", () => operate(call, model.name, button));
    row.append(button);
  }
  return row;
}

// Keeps the focus where it was: the cards are made anew with every status.
function show(status) {
  const focused = document.activeElement;
  const model = focused && focused.closest ? focused.closest("[data-model]") : null;
  const kept = model ? [model.dataset.model, focused.dataset.call] : null;
  skewS = Date.now() / 1000 - status.at;
  byId("simulated").hidden = !status.simulated;
  const vaults = status.host.vault ? [vaultCard(status, status.host.vault)] : [];
  byId("gpus").replaceChildren(...status.gpus.map((gpu) => gpuCard(status, gpu)), hostCard(status), ...vaults);
  byId("cluster").hidden = !status.nodes;
  byId("nodes").replaceChildren(...(status.nodes || []).map(nodeCard));
  byId("models").replaceChildren(...status.models.map((each) => modelCard(status, each)));
  announce(status);
  last = status;
  byId("key").textContent = status.operator ? "Operator" : token ? "Change the token" : "Enter a token";
  if (!kept) return;
  for (const card of byId("models").children) {
    const again = card.querySelector(`[data-call="${kept[1]}"]`);
    if (card.dataset.model === kept[0] && again) again.focus();
  }
}

// For those who hear the page: what changed.
function announce(status) {
  if (last === null) return;
  const before = new Map(last.models.map((model) => [model.name, model.phase]));
  const news = status.models.filter((model) => before.get(model.name) !== model.phase && (model.phase === "awake" || RESTS.has(model.phase)));
  if (news.length) byId("news").textContent = news.map((model) => `${model.name} is ${model.phase}`).join(", ");
}

function complain(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

function link(kind, text) {
  byId("link").className = `link ${kind}`;
  byId("link").textContent = text;
}

// What is asked of the front

function headers() {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function errorOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `status ${answer.status}`;
  }
}

async function operate(call, model, button) {
  button.disabled = true;
  complain("");
  try {
    const answer = await fetch(`admin/${call}`, { method: "POST", headers: headers(), body: JSON.stringify({ model }) });
    if (!answer.ok) complain(`${call} ${model}: ${await errorOf(answer)}`);
  } catch {
    complain(`${call} ${model}: the front does not answer`);
  }
}

async function follow() {
  for (;;) {
    reading = new AbortController();
    try {
      const answer = await fetch("status/live", { headers: headers(), signal: reading.signal, cache: "no-store" });
      if (answer.status === 401) {
        link("lost", token ? "this token is not accepted" : "a token is needed");
        byId("gpus").replaceChildren();
        byId("cluster").hidden = true;
        byId("models").replaceChildren();
        await new Promise((resolve) => { reading.signal.addEventListener("abort", resolve); openDialog(); });
        continue;
      }
      if (!answer.ok) throw new Error(await errorOf(answer));
      await readEvents(answer.body.getReader());
      link("lost", "the front has ended");
    } catch (error) {
      if (reading.signal.aborted) { pauseMs = 0; continue; }
      link("lost", "no connection, trying again");
    }
    pauseMs = Math.min(LONGEST_PAUSE_MS, pauseMs * 2 || 500);
    await new Promise((resolve) => { setTimeout(resolve, pauseMs); });
  }
}

async function readEvents(reader) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const events = text.split("\n\n");
    text = events.pop();
    const newest = events.filter((event) => event.startsWith("data: ")).pop();
    if (newest === undefined) continue;
    show(JSON.parse(newest.slice(6)));
    pauseMs = 0;
    link("live", "live");
  }
}

// The token: it stays in this tab. A link may bring it (`/#token=…`), which no server sees and the address forgets.

function tokenOfLink() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found) {
    sessionStorage.setItem(STORED, found);
    history.replaceState(null, "", location.pathname);
  }
  return found;
}

function openDialog() {
  if (byId("ask").open) return;
  byId("token").value = token;
  byId("ask").showModal();
}

function use(text) {
  token = text;
  if (token) sessionStorage.setItem(STORED, token);
  else sessionStorage.removeItem(STORED);
  byId("ask").close();
  complain("");
  if (reading) reading.abort();
}

addEventListener("hashchange", () => { const found = tokenOfLink(); if (found) use(found); });
byId("key").addEventListener("click", openDialog);
byId("ask-form").addEventListener("submit", (event) => { event.preventDefault(); use(byId("token").value.trim()); });
byId("forget").addEventListener("click", () => use(""));
byId("cancel").addEventListener("click", () => byId("ask").close());
setInterval(() => {
  if (last === null) return;
  for (const model of last.models) {
    const card = [...byId("models").children].find((each) => each.dataset.model === model.name);
    const line = card && card.querySelector(".switch");
    if (line && model.last_switch) line.textContent = switchText(model.last_switch);
  }
}, 1000);
follow();

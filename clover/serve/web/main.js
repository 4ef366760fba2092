// The conversation, its controls, and what happens when the server is gone.

import { Answer, make } from "./answer.js";
import { chat, isHealthy, keepKey, listModels } from "./api.js";
import { EXAMPLES, TOOLS } from "./examples.js";
import { Meter, round } from "./meter.js";

const AUTOREGRESSIVE = "autoregressive"; // as a rival: the same model, one token a pass
const IDLE_POLL_MILLISECONDS = 5000;
const LOST_POLL_MILLISECONDS = 500;
const METER_MILLISECONDS = 100;
const NEAR_END_PIXELS = 80;
const MODE_NOTES = {
  fast: "Keeps what comes close to one token at a time.",
  balanced: "Keeps what comes very close to one token at a time.",
  exact: "Writes what one token at a time would give.",
};

const find = (id) => document.getElementById(id);
const scroller = find("scroll");
const log = find("log");
const prompt = find("prompt");

let history = []; // messages, as the API has them
let isUnanswered = false; // the last of them has got nothing back
let running = null; // an AbortController while an answer is written
let answers = []; // those that are being written
let isLost = false; // the server does not answer

// A turn

async function send(text) {
  if (running || !text.trim()) return;
  const open = log.querySelector("form.calls.open");
  if (open && !open.reportValidity()) return; // the format wants a result for each call
  if (isUnanswered && history.at(-1).role === "user") {
    history.pop();
    [...log.querySelectorAll(".question")].at(-1).classList.add("unanswered");
  }
  history.push({ role: "user", content: text });
  log.append(make("article", "turn question text", text));
  prompt.value = "";
  await answerTurn();
}

/** Has the chat so far answered, in a race by two. */
async function answerTurn() {
  const tools = readTools();
  if (!tools) return;
  hideBanner();
  find("welcome").hidden = true;
  const isThinking = find("thinking").checked;
  const model = find("model").value;
  const body = {
    model,
    messages: history,
    stream: true,
    stream_canvas: true,
    stream_options: { include_usage: true },
    chat_template_kwargs: { enable_thinking: isThinking },
    ...(tools.length && { tools }),
  };
  setRunning(new AbortController());
  const turn = make("div", "round");
  const lanes = [startLane(model, { ...body, mode: readMode() }, turn)];
  if (find("race").checked) lanes.push(startRival(body, turn));
  turn.classList.toggle("race", lanes.length > 1);
  log.append(turn);
  scrollDown({ isForced: true });
  const ticking = setInterval(() => showMeters(lanes), METER_MILLISECONDS);
  const errors = await Promise.all(lanes.map(readLane));
  clearInterval(ticking);
  setRunning(null);
  finishTurn(turn, lanes, errors.find(Boolean));
}

function startRival(body, turn) {
  const rival = find("rival").value;
  if (rival !== AUTOREGRESSIVE) return startLane(rival, { ...body, model: rival }, turn);
  return startLane(`${body.model}, one by one`, { ...body, policy: AUTOREGRESSIVE }, turn);
}

function startLane(title, body, turn) {
  const isThinking = body.chat_template_kwargs.enable_thinking;
  const answer = new Answer({ isThinking, isSlow: () => find("slow").checked, onPaint: scrollDown });
  const heading = make("h3", "lane", title);
  const clock = make("span", "clock");
  heading.append(clock);
  answer.element.prepend(heading);
  turn.append(answer.element);
  answers.push(answer);
  return { title, body, answer, clock, meter: new Meter() };
}

/** Reads one answer to its end; returns the error that ended it early, null without one. */
async function readLane({ body, answer, meter }) {
  let error = null;
  try {
    for await (const chunk of chat(body, running.signal)) {
      meter.count(chunk);
      if (!chunk.usage) answer.push(chunk);
    }
  } catch (caught) {
    error = caught;
  }
  meter.end();
  await answer.end(error?.name === "AbortError" ? "Stopped." : "");
  return error;
}

function finishTurn(turn, lanes, error) {
  const [{ answer }, rival] = lanes;
  const { content, reasoning, tool_calls: calls } = answer.message;
  answers = [];
  isUnanswered = !content && !calls.length;
  if (!isUnanswered) {
    history.push({
      role: "assistant",
      content,
      ...(reasoning && { reasoning }),
      ...(calls.length && { tool_calls: calls }),
    });
  }
  showMeters(lanes);
  for (const lane of lanes) lane.answer.element.append(make("p", "cost", lane.meter.summary));
  if (error && error.name !== "AbortError") {
    if (isUnanswered) turn.remove();
    showError(error);
  } else if (rival && !error) {
    turn.append(make("p", "verdict", judge(...lanes)));
  }
  if (calls.length) askForResults(answer.calls, calls);
  else if (!find("key-dialog").open) prompt.focus();
  scrollDown();
}

function judge(mine, rival) {
  const [winner, other] = mine.meter.speed >= rival.meter.speed ? [mine, rival] : [rival, mine];
  const ratio = winner.meter.speed / other.meter.speed;
  const isSame = mine.answer.message.content === rival.answer.message.content;
  const texts = isSame ? "Both wrote the same." : "The texts differ.";
  return `${winner.title}: ${ratio.toFixed(2)}× the tokens per second. ${texts}`;
}

/** Lets the user say what the calls gave; the model goes on from there. */
function askForResults(form, calls) {
  calls.forEach((call, index) => {
    const label = make("label", "", "Result");
    const field = make("textarea");
    Object.assign(field, { rows: 1, required: true });
    field.setAttribute("aria-label", `Result of ${call.function.name}`);
    field.addEventListener("keydown", (event) => submitOnEnter(event, form));
    label.append(field);
    form.children[index].append(label);
  });
  const button = make("button", "", calls.length > 1 ? "Send results" : "Send result");
  form.append(button);
  form.classList.add("open");
  const fields = [...form.querySelectorAll("textarea")];
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    form.classList.remove("open");
    button.remove();
    fields.forEach((field, index) => {
      field.readOnly = true;
      history.push({ role: "tool", tool_call_id: calls[index].id, content: field.value });
    });
    answerTurn();
  });
  fields[0].focus();
}

function stop() {
  running?.abort();
  answers.forEach((answer) => answer.hurry());
}

function startNewChat() {
  history = [];
  isUnanswered = false;
  log.replaceChildren();
  hideBanner();
  find("welcome").hidden = false;
  prompt.focus();
}

// What is shown

function setRunning(controller) {
  running = controller;
  document.body.classList.toggle("running", Boolean(running));
  log.setAttribute("aria-busy", String(Boolean(running)));
  find("send").textContent = running ? "Stop" : "Send";
  find("new-chat").disabled = Boolean(running);
}

function showMeters(lanes) {
  const { meter } = lanes[0];
  find("speed").textContent = round(meter.speed);
  find("tpf").textContent = round(meter.tpf);
  find("previews").textContent = round(meter.previewsPerBlock);
  if (lanes.length < 2) return;
  for (const { clock, meter: each } of lanes) {
    clock.textContent = `${each.seconds.toFixed(1)} s · ${round(each.speed)} tokens/s`;
  }
}

/** Follows the text, unless the user has scrolled away from its end. */
function scrollDown({ isForced = false } = {}) {
  const below = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  if (isForced || below < NEAR_END_PIXELS) scroller.scrollTop = scroller.scrollHeight;
}

function showError(error) {
  if (error.status === 401) {
    askForKey(answerTurn);
  } else if (error.status === 0) {
    loseServer(error.message);
  } else if (error.status === 429) {
    showBanner(`The server is busy. Try again in ${error.retrySeconds} s.`);
  } else {
    showBanner(error.message);
  }
}

function showBanner(text) {
  find("banner-text").textContent = text;
  find("retry").hidden = isLost || !["user", "tool"].includes(history.at(-1)?.role);
  find("banner").hidden = false;
}

function hideBanner() {
  find("banner").hidden = true;
}

// The server

async function start() {
  try {
    showModels(await listModels());
  } catch (error) {
    if (error.status === 401) askForKey(start);
    else if (error.status === 0) loseServer(error.message);
    else showBanner(error.message);
  }
}

/** Offers the models; one that is named for the parent of another is there to race against. */
function showModels(models) {
  const isParent = (name) => models.some((model) => name === `${model}-parent`);
  const select = find("model");
  const chosen = select.value;
  select.replaceChildren(...models.filter((name) => !isParent(name)).map((name) => new Option(name)));
  if (models.includes(chosen)) select.value = chosen;
  select.disabled = select.options.length < 2;
  select.onchange = () => showRivals(models);
  showRivals(models);
}

function showRivals(models) {
  const model = find("model").value;
  const rivals = models.filter((name) => name !== model).map((name) => new Option(name));
  find("rival").replaceChildren(...rivals, new Option("itself, one by one", AUTOREGRESSIVE));
  find("rival").value = models.includes(`${model}-parent`) ? `${model}-parent` : AUTOREGRESSIVE;
}

function askForKey(then) {
  const dialog = find("key-dialog");
  find("key-error").textContent = sessionStorage.length ? "That key was not accepted." : "";
  find("key-form").onsubmit = (event) => {
    event.preventDefault();
    keepKey(find("key").value);
    dialog.close();
    then();
  };
  dialog.showModal();
}

function loseServer(reason) {
  isLost = true;
  showBanner(`${reason[0].toUpperCase()}${reason.slice(1)}. Waiting for it to come back…`);
}

async function watchServer() {
  if (!document.hidden && !running) {
    const isThere = await isHealthy();
    if (!isThere && !isLost && !running) loseServer("the server cannot be reached");
    if (isThere && isLost) {
      isLost = false;
      await start();
      if (isUnanswered) showBanner("The server is back.");
      else hideBanner();
    }
  }
  setTimeout(watchServer, isLost ? LOST_POLL_MILLISECONDS : IDLE_POLL_MILLISECONDS);
}

// Controls

function readMode() {
  return document.querySelector("input[name=mode]:checked").value;
}

/** Returns the tools of the panel; null, and says why, where there is no list of them. */
function readTools() {
  const text = find("tools").value.trim();
  let tools = [];
  try {
    tools = text ? JSON.parse(text) : [];
    if (!Array.isArray(tools)) throw new Error("expected a list");
  } catch (error) {
    find("tools-error").textContent = `Not a JSON list: ${error.message}`;
    showTools(true);
    find("tools").focus();
    return null;
  }
  find("tools-error").textContent = "";
  find("tools-toggle").textContent = tools.length ? `Tools · ${tools.length}` : "Tools";
  return tools;
}

function showTools(isShown) {
  find("tools-panel").hidden = !isShown;
  find("tools-toggle").setAttribute("aria-expanded", String(isShown));
}

function setTools(tools) {
  find("tools").value = tools.length ? JSON.stringify(tools, null, 2) : "";
  readTools();
}

function submitOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

for (const { title, prompt: text, isThinking = false, tools = [] } of EXAMPLES) {
  const button = make("button", "example");
  button.append(make("b", "", title), make("span", "", text));
  button.addEventListener("click", () => {
    find("thinking").checked = isThinking;
    setTools(tools);
    send(text);
  });
  find("examples").append(button);
}

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else send(prompt.value);
});
prompt.addEventListener("keydown", (event) => {
  if (!running) submitOnEnter(event, find("composer"));
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) stop();
});
document.querySelectorAll("input[name=mode]").forEach((input) => {
  input.addEventListener("change", () => (find("mode-note").textContent = MODE_NOTES[readMode()]));
});
find("race").addEventListener("change", () => (find("rival").hidden = !find("race").checked));
find("tools-toggle").addEventListener("click", () => showTools(find("tools-panel").hidden));
find("tools").addEventListener("input", () => readTools());
find("tools-example").addEventListener("click", () => setTools(TOOLS));
find("tools-clear").addEventListener("click", () => setTools([]));
find("new-chat").addEventListener("click", startNewChat);
find("retry").addEventListener("click", () => answerTurn());
find("dismiss").addEventListener("click", hideBanner);

find("mode-note").textContent = MODE_NOTES[readMode()];
prompt.focus();
await start();
watchServer();

/** The chat: asks, follows, stops; and after a reload goes on where it was. */

import { earlier, empty, findPlace, putAway, randomName, take } from "/page/chats.js";
import { toBottom, watchScrolling } from "/page/scrolling.js";
import { Follower, Refusal, call, create, pause } from "/page/streams.js";
import { Announcer, AnswerView, showQuestion, summary } from "/page/turns.js";

const SAVE_MS = 500;
const REASK_MS = 1000;
const LONGEST_REASK_MS = 8000;
const ROOM_TOKENS = 512; // that an answer should find free
const TEMPERATURE = 0.6; // at 1 small models ramble

const ui = Object.fromEntries(Array.from(document.body.querySelectorAll("[id]"), (element) => [element.id, element]));
const announcer = new Announcer(ui.announcer);

const { place, chat: found } = await findPlace();
let chat = found;
let active = null; // the answer that is on its way: {chat, exchange, answer, view, follower, hurry}
let models = []; // as /v1/models tells of them
let saving = 0;

// Keeping

function save() {
  clearTimeout(saving);
  saving = 0;
  place.save(chat);
}

/** Soon: tokens come faster than storage should be written. */
function saveSoon() {
  saving ||= setTimeout(save, SAVE_MS);
}

// Showing

function showChat() {
  ui.chat.replaceChildren();
  const views = chat.exchanges.map(showExchange);
  showBorder();
  showWelcome();
  return views;
}

function showExchange(exchange) {
  const view = new AnswerView(exchange.answer, regenerate);
  ui.chat.append(showQuestion(exchange.question), view.element);
  if (isOver(exchange.answer)) showEnd(exchange.answer, view);
  return view;
}

function showProgress({ answer, view }) {
  if (answer.isStopping) view.say("Stopping…", "waiting");
  else if (answer.text) view.say("", "running");
  else view.say("Waiting for the first token…", "waiting");
}

function showEnd(answer, view) {
  view.end();
  view.say(summary(answer), answer.status === "done" || answer.status === "cancelled" ? "ended" : "failed");
}

/** A line above the first exchange that the model still reads. */
function showBorder() {
  ui.chat.querySelector(".border")?.remove();
  if (!chat.from) return;
  const border = document.createElement("p");
  border.className = "border";
  border.textContent = "The chat has outgrown what the model can read. It no longer sees what is above this line.";
  ui.chat.children[2 * chat.from]?.before(border);
}

function showWelcome() {
  ui.welcome.hidden = chat.exchanges.length > 0;
  ui.back.hidden = ui.earlier.hidden;
  ui.new.disabled = chat.exchanges.length === 0;
}

function showBusy() {
  const isBusy = active !== null;
  const hadFocus = document.activeElement === (isBusy ? ui.send : ui.stop);
  ui.send.hidden = isBusy;
  ui.stop.hidden = !isBusy;
  document.body.classList.toggle("busy", isBusy);
  if (hadFocus) ui.question.focus();
}

function notice(text) {
  ui.notice.textContent = text;
}

const isOver = (answer) => !["asking", "running"].includes(answer.status);

// Asking

const newAnswer = () => ({ text: "", status: "asking", key: randomName(), seq: 0, tokens: 0, asked_ms: Date.now() });

function send(question) {
  if (active || !question.trim()) return;
  notice("");
  const exchange = { question, answer: newAnswer() };
  chat.exchanges.push(exchange);
  makeRoom();
  const view = showExchange(exchange);
  showBorder();
  showWelcome();
  toBottom();
  answerTo(exchange, view);
}

/** The last answer once more. The old one stays until the server has taken the question. */
function regenerate() {
  const exchange = chat.exchanges.at(-1);
  if (active || !exchange) return;
  notice("");
  const before = { ...exchange.answer, before: undefined };
  exchange.answer = { ...newAnswer(), before };
  const view = new AnswerView(exchange.answer, regenerate);
  ui.chat.lastElementChild.replaceWith(view.element);
  answerTo(exchange, view);
  ui.question.focus();
}

/** From wherever it is to its end. */
async function answerTo(exchange, view) {
  const { answer } = exchange;
  const mine = { chat, exchange, answer, view, follower: null, hurry: new AbortController() };
  active = mine;
  showBusy();
  save();
  showProgress(mine);
  try {
    if (!answer.events_url) await begin(mine);
  } catch (error) {
    if (active === mine) {
      withdraw(mine);
      notice(explain(error));
    }
    return;
  }
  if (active !== mine) return;
  if (answer.events_url) follow(mine);
  else withdraw(mine);
}

/** Have the stream created, unless somebody stops it before. Repeats itself until the server is reached, under the same
 * key: there is only one stream. Throws: Refusal. */
async function begin(mine) {
  const { answer, view, hurry } = mine;
  for (let pause_ms = REASK_MS; ; pause_ms = Math.min(2 * pause_ms, LONGEST_REASK_MS)) {
    try {
      const { events_url, cancel_url, model } = await create(bodyOf(mine.chat), answer.key);
      if (answer.isStopping) cancel({ cancel_url });
      if (active !== mine) return;
      Object.assign(answer, { events_url, cancel_url, status: "running", before: undefined });
      if (models.length < 2) ui.model.textContent = model;
      save();
      return;
    } catch (error) {
      if (error instanceof Refusal) {
        if (active !== mine || !adapt(error)) throw error;
        continue;
      }
      view.say("Cannot reach the server. Trying again…", "waiting");
      await pause(pause_ms, hurry.signal);
      if (answer.isStopping) return;
    }
  }
}

function bodyOf({ exchanges, from, model }) {
  const said = exchanges.slice(from, -1).filter((exchange) => exchange.answer.text);
  const messages = said.flatMap((each) => [turn("user", each.question), turn("assistant", each.answer.text)]);
  const body = { messages: [...messages, turn("user", exchanges.at(-1).question)], temperature: TEMPERATURE };
  return model && isServed(model) ? { ...body, model } : body;
}

const isServed = (model) => models.some(({ id }) => id === model);
const turn = (role, content) => ({ role, content });

/** Ask for less where the whole cannot be had. Returns whether there is a point in asking again. */
function adapt(refusal) {
  if (refusal.code !== "context_length_exceeded" || chat.from === chat.exchanges.length - 1) return false;
  chat.from += 1;
  showBorder();
  return true;
}

/** Leave out the oldest exchanges before they take the answer's room. Earlier counts tell how many tokens text has. */
function makeRoom() {
  const measured = chat.exchanges.findLast((exchange) => exchange.answer.usage);
  if (!measured) return;
  const { usage, characters } = measured.answer;
  const contextTokens = (models.find(({ id }) => id === chat.model) ?? models[0])?.max_model_len || Infinity;
  const room = (contextTokens - Math.min(ROOM_TOKENS, contextTokens / 4)) * (characters / usage.total_tokens);
  while (chat.from < chat.exchanges.length - 1 && length(chat) > room) chat.from += 1;
}

const length = ({ exchanges, from }) =>
  exchanges.slice(from).reduce((sum, { question, answer }) => sum + question.length + answer.text.length, 0);

/** Nothing has begun: all is as it was before, and the question can be sent again. */
function withdraw({ exchange, answer }) {
  active = null;
  if (answer.before) {
    exchange.answer = answer.before;
  } else {
    chat.exchanges.pop();
    chat.from = Math.min(chat.from, chat.exchanges.length);
    ui.question.value = [exchange.question, ui.question.value].filter(Boolean).join("\n\n");
    fitQuestion();
  }
  save();
  showChat();
  showBusy();
}

function explain(error) {
  return error.retryAfter ? `${error.message} Try again in ${error.retryAfter} s.` : error.message;
}

// Following

function follow(mine) {
  const { answer, view } = mine;
  mine.follower = new Follower(answer, answer.seq, {
    connected() {
      showProgress(mine);
      if (answer.isStopping) cancel(answer); // it may not have been heard
    },
    disconnected() {
      answer.wasResumed = true;
      view.say("Connection lost. Reconnecting…", "waiting");
    },
    delta(fields, seq) {
      const now_ms = Date.now();
      answer.first_ms ??= now_ms;
      answer.last_ms = now_ms;
      answer.tokens += fields.token_ids.length;
      answer.firstTokens ??= answer.tokens;
      answer.isCut = fields.finish_reason === "length";
      answer.text += fields.text;
      answer.seq = seq;
      saveSoon();
      if (view.element.dataset.mood !== "running") showProgress(mine);
      view.write(fields.text);
      announcer.add(fields.text);
    },
    ended(status, fields, seq) {
      answer.seq = seq;
      answer.usage = fields.usage;
      answer.characters = length(chat);
      answer.tokens = fields.usage.completion_tokens;
      answer.reason = fields.error?.message;
      finish(mine, status);
    },
    lost(refusal) {
      answer.reason = LOST[refusal.code] ?? `The rest cannot be had: ${refusal.message}`;
      finish(mine, "lost");
    },
  });
}

const LOST = {
  unknown_stream: "The rest is lost: the server no longer knows this answer; it was probably restarted",
  stream_expired: "The rest is lost: the server keeps answers for a while, and this one's time is over",
};

function finish(mine, status) {
  active = null;
  mine.answer.status = status;
  save();
  showEnd(mine.answer, mine.view);
  showBusy();
  announcer.finish(status === "done" ? "End of the answer." : summary(mine.answer));
}

/** Not being heard is no failure: it is said again with the next connection. */
function cancel(answer) {
  call("POST", answer.cancel_url).catch(() => {});
}

function stop() {
  if (!active) return;
  const { answer, hurry } = active;
  answer.isStopping = true;
  showProgress(active);
  save();
  hurry.abort();
  if (answer.cancel_url) cancel(answer);
}

/** The old chat is kept among the earlier ones. */
function newChat() {
  replaceChat({ ...empty(), model: chat.model });
}

function openEarlier(name) {
  replaceChat(take(name));
  toBottom();
}

function replaceChat(other) {
  if (active) {
    const mine = active;
    stop();
    mine.follower?.close();
    finish(mine, "cancelled");
  }
  if (chat.exchanges.length) putAway(chat);
  chat = other;
  notice("");
  save();
  resume(showChat());
  showModel();
  showEarlier();
  ui.question.focus();
}

async function showEarlier() {
  const found = await earlier();
  ui.earlier.replaceChildren(new Option("Earlier chats", ""), ...found.map(({ name, title }) => new Option(title, name)));
  ui.earlier.hidden = found.length === 0;
  showWelcome();
}

/** One model is named; of several one is chosen, for each chat. */
function showModel() {
  if (models.length === 1) ui.model.textContent = models[0].id;
  ui.models.hidden = models.length < 2;
  ui.models.replaceChildren(...models.map(({ id }) => new Option(id, id)));
  if (isServed(chat.model)) ui.models.value = chat.model;
}

// The window

function fitQuestion() {
  ui.question.style.height = "auto";
  ui.question.style.height = `${ui.question.scrollHeight}px`;
}

function submit() {
  if (active) return;
  const question = ui.question.value;
  ui.question.value = "";
  fitQuestion();
  send(question);
}

function listen() {
  ui.composer.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  ui.question.addEventListener("input", fitQuestion);
  ui.question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  addEventListener("keydown", (event) => event.key === "Escape" && !event.isComposing && stop());
  ui.stop.addEventListener("click", stop);
  ui.new.addEventListener("click", newChat);
  ui.back.addEventListener("click", () => openEarlier(ui.earlier.options[1].value));
  ui.earlier.addEventListener("change", () => openEarlier(ui.earlier.value));
  ui.models.addEventListener("change", () => {
    chat.model = ui.models.value;
    save();
  });
  addEventListener("focus", showEarlier); // another tab may have been closed
  ui.examples.addEventListener("click", (event) => event.target.closest("button") && send(event.target.textContent));
  addEventListener("pagehide", save);
  addEventListener("pageshow", (event) => event.persisted && location.reload()); // its stream was closed meanwhile
}

async function introduce() {
  try {
    models = (await call("GET", "/v1/models")).data;
    showModel();
  } catch {
    // The next answer names the model, and what is too long is refused.
  }
}

/** The answer that was on its way before a reload. */
function resume(views) {
  const exchange = chat.exchanges.at(-1);
  if (!exchange || isOver(exchange.answer)) return;
  if (exchange.answer.seq) exchange.answer.wasResumed = true; // its pace is no longer the model's
  answerTo(exchange, views.at(-1));
}

listen();
watchScrolling(ui.latest);
resume(showChat());
showBusy();
toBottom();
fitQuestion();
save();
introduce();
showEarlier();
if (matchMedia("(hover: hover)").matches) ui.question.focus(); // no keyboard over a phone's page
document.body.classList.add("ready");

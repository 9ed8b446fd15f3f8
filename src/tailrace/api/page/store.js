/** What the page knows: who is signed in, the models, the conversations, and the one that is open. */

import { batch, computed, signal } from "./lib/signals.js";
import { at, call, explain, randomName, whenSignedOut } from "./api.js";
import { keep, keepQuestion, recallQuestion } from "./storage.js";
import { LiveAnswer } from "./live.js";
import { NO_SETTINGS, metadataOf, settingsOf } from "./settings.js";
import { followResponse, forgetResponse, isCalling, loadServers, response, stopResponse, toolsOf } from "./tools.js";
import { Tree } from "./tree.js";

const ID = /^[\w-]{1,64}$/;
const PAGE = 30; // conversations at once
const NOTE_MS = 12_000;
const RESPONSE = "mcp_response"; // in the metadata of a conversation: the newest response with tools

export const account = signal(null); // {owner, key_id}; null until the server has said, and while signed out
export const isAdmin = computed(() => account.value !== null && (account.value.scopes?.includes("admin") ?? true));
export const isSignedOut = signal(false);
export const models = signal([]);
export const conversations = signal([]);
export const hasMore = signal(false);
export const search = signal("");
export const openId = signal(""); // "" is a conversation that does not exist yet
export const conversation = signal(null); // as the server tells it; null until it is loaded
export const tree = signal(new Tree([]));
export const settings = signal(NO_SETTINGS);
export const live = signal(new Map()); // by the id of the stream
export const asking = signal(null); // a question that the server has not taken yet: {conversationId, parentId, text, state}
export const unsentText = signal(""); // of a question whose images were lost on their way
export const alarm = signal(""); // what went wrong, until something else is done
export const note = signal(""); // what happened, for a moment
export const isLoading = signal(false);

export const seesImages = computed(() => model.value?.capabilities?.includes("vision") ?? false);
export const model = computed(() => models.value.find(({ id }) => id === settings.value.model) ?? models.value[0] ?? null);
/** The answer that the open branch ends in, if it is being written. */
export const running = computed(() => live.value.get(tree.value.last?.stream_id) ?? null);
export const isBusy = computed(
  () =>
    (asking.value !== null && asking.value.conversationId === openId.value) ||
    (running.value !== null && running.value.phase.value !== "over") ||
    isCalling.value,
);

const measured = new Map(); // facts of answers that this page has seen, by the id of the stream
let noteTimer = 0;
let startedS = 0; // when the server started
let lostAt_ms = 0; // when the connection went

export function say(text) {
  note.value = text;
  clearTimeout(noteTimer);
  noteTimer = setTimeout(() => (note.value = ""), NOTE_MS);
}

export const fail = (error) => (alarm.value = explain(error));

/** How an answer went: as the server has recorded it, or as this page has seen it. */
export function factsOf(item) {
  const seen = measured.get(item.stream_id);
  const recorded = tree.value.answers[item.stream_id];
  return seen || recorded ? { ...recorded, ...seen } : null;
}

// Who is signed in

whenSignedOut(() => {
  if (isSignedOut.value) return;
  for (const answer of live.value.values()) answer.close();
  batch(() => {
    isSignedOut.value = true;
    account.value = null;
    live.value = new Map();
    conversations.value = [];
    conversation.value = null;
    tree.value = new Tree([]);
  });
});

/** Throws: Refusal where the key is not valid. */
export async function signIn(key) {
  account.value = await call("POST", "/v1/session", {}, { headers: { authorization: `Bearer ${key}` } });
  isSignedOut.value = false;
  await start();
}

export async function signOut() {
  await call("DELETE", "/v1/session").catch(() => {});
  location.assign(at("/"));
}

/** Everything that can be known at first. */
export async function start() {
  try {
    account.value = await call("GET", "/v1/session");
    await Promise.all([loadModels(), loadList(), loadServers(), open(location.hash.slice(1))]);
    await resendQuestion();
  } catch (error) {
    if (!isSignedOut.value) fail(error);
  }
}

export async function loadModels() {
  models.value = (await call("GET", "/v1/models")).data;
  startedS ||= models.value[0]?.created ?? 0;
}

// The list

export async function loadList({ isMore = false } = {}) {
  const query = new URLSearchParams({ limit: PAGE });
  if (search.value) query.set("search", search.value);
  if (isMore && conversations.value.length) query.set("after", conversations.value.at(-1).id);
  const wanted = search.value;
  const page = await call("GET", `/v1/conversations?${query}`);
  if (wanted !== search.value) return; // another search has begun
  batch(() => {
    conversations.value = isMore ? [...conversations.value, ...page.data] : page.data;
    hasMore.value = page.has_more;
  });
}

export async function rename(id, title) {
  const changed = await call("POST", `/v1/conversations/${id}`, { title });
  conversations.value = conversations.value.map((one) => (one.id === id ? changed : one));
  if (id === openId.value) conversation.value = changed;
}

export async function remove(id) {
  await call("DELETE", `/v1/conversations/${id}`);
  conversations.value = conversations.value.filter((one) => one.id !== id);
  keep(`draft.${id}`, null);
  if (id === openId.value) go("");
}

export async function importFiles(files) {
  let count = 0;
  let leftOut = 0;
  for (const file of files) {
    const made = await call("POST", "/v1/conversations/import", await file.text());
    count += made.data.length;
    leftOut += made.num_left_out;
  }
  say(`${count} conversation${count === 1 ? "" : "s"} imported.${leftOut ? ` Left out, because they are not text: ${leftOut}.` : ""}`);
  await loadList();
}

// The open conversation

/** Show another conversation; "" is a new one. At once: what is asked next belongs to it. */
export function go(id) {
  if (location.hash.slice(1) !== id) location.hash = id;
  open(id).catch(fail);
}

export async function open(given) {
  const id = ID.test(given) ? given : ""; // an address may come from anybody, and must not become another path
  for (const answer of live.value.values()) answer.close(); // the server goes on with them
  forgetResponse();
  batch(() => {
    live.value = new Map();
    alarm.value = "";
    openId.value = id;
    conversation.value = null;
    tree.value = new Tree([]);
    settings.value = NO_SETTINGS;
    isLoading.value = id !== "";
  });
  if (!id) return;
  try {
    await load();
  } catch (error) {
    if (error.status !== 404) throw error;
    leave();
  } finally {
    isLoading.value = false;
  }
}

/** The open conversation is gone. */
function leave() {
  history.replaceState(null, "", at("/"));
  open("");
  say("This conversation no longer exists.");
}

/** The conversation as it is now, and its answers that are being written. */
export async function load() {
  const id = openId.value;
  if (!id) return;
  const [found, all] = await Promise.all([
    call("GET", `/v1/conversations/${id}`),
    call("GET", `/v1/conversations/${id}/tree`),
  ]);
  if (id !== openId.value) return;
  batch(() => {
    conversation.value = found;
    settings.value = settingsOf(found.metadata);
    show(new Tree(all.data, all.head, all.answers));
  });
  const responseId = found.metadata[RESPONSE];
  if (ID.test(responseId ?? "") && response.value?.id !== responseId) followResponse(responseId, onItems);
}

const onItems = () => load().catch(() => {});

/** Keep which response with tools is the newest, for a page that is loaded again. */
async function keepResponse(conversationId, responseId) {
  const { metadata } = await call("GET", `/v1/conversations/${conversationId}`);
  const { [RESPONSE]: before, ...others } = metadata;
  if ((before ?? "") === responseId) return;
  await call("POST", `/v1/conversations/${conversationId}`, { metadata: responseId ? { ...others, [RESPONSE]: responseId } : others });
}

/** Ask with tools. Returns when the conversation has the question. */
async function askWithTools(body, key, conversationId, hurry) {
  const headers = { "idempotency-key": key };
  const made = await untilReached(() => call("POST", "/v1/responses", body, { headers, wait_ms: 120_000 }), hurry);
  await keepResponse(conversationId, made.id);
  if (openId.value !== conversationId) return;
  await followResponse(made.id, onItems);
  await load();
}

/** Say which calls may be made, as items of a response. */
export async function answerCalls(items) {
  const conversationId = openId.value;
  const chosen = settings.value;
  if (isBusy.value) return;
  alarm.value = "";
  response.value = { ...response.value, asks: [] };
  const hurry = new AbortController();
  asking.value = {
    conversationId,
    parentId: tree.value.last?.id ?? null,
    text: null,
    settings: chosen,
    state: signal("sending"),
    stop: () => hurry.abort(),
  };
  try {
    const body = { ...responseOf(chosen, null), conversation: conversationId, input: items };
    await askWithTools(body, randomName(), conversationId, hurry.signal);
  } catch (error) {
    if (error !== STOPPED) fail(error);
    forgetResponse();
    load().catch(() => {});
  } finally {
    asking.value = null;
  }
}

function show(next) {
  const following = new Map(live.value);
  for (const item of next.items.values()) {
    if (item.status !== "in_progress" || following.has(item.stream_id)) continue;
    following.set(item.stream_id, follow(item.stream_id, textOf(item)));
  }
  for (const [streamId, answer] of following) {
    // One that is over stays until the server has its text.
    const isShown = next.byStream(streamId)?.status === "in_progress" || answer.phase.value !== "over";
    if (!isShown) following.delete(streamId);
  }
  batch(() => {
    tree.value = next;
    live.value = following;
  });
}

function follow(streamId, prefix, { asked_ms = null, model: itsModel = null } = {}) {
  return new LiveAnswer(streamId, {
    prefix,
    asked_ms,
    model: itsModel,
    events: { connected: onConnected, disconnected: onDisconnected, ended: onEnded },
  });
}

function onDisconnected() {
  lostAt_ms ||= performance.now();
}

async function onConnected() {
  if (!lostAt_ms) return;
  const seconds = Math.max(1, Math.round((performance.now() - lostAt_ms) / 1000));
  lostAt_ms = 0;
  const before = startedS;
  startedS = 0;
  await loadModels().catch(() => (startedS = before));
  const wasRestarted = before !== 0 && startedS !== before;
  say(wasRestarted ? "The server was restarted. Nothing was lost." : `The connection was lost for ${seconds} s. Nothing was lost.`);
}

function onEnded(answer) {
  measured.set(answer.streamId, answer.facts.value);
  load().catch(() => {});
  loadList().catch(() => {});
}

/** What another tab or device has changed, and whether the key still works. */
export async function refresh() {
  const known = conversation.value;
  if (!known) {
    if (account.value?.key_id) await call("GET", "/v1/session").catch(() => {});
    return;
  }
  if (isSignedOut.value) return;
  const found = await call("GET", `/v1/conversations/${known.id}`).catch((error) => error);
  if (known !== conversation.value) return;
  if (found.status === 404) {
    leave();
    loadList().catch(() => {});
  }
  if (found instanceof Error) return;
  const isOther = ["updated_at", "head", "num_items", "title"].some((name) => found[name] !== known[name]);
  if (isOther) await Promise.all([load(), loadList()]).catch(() => {});
}

/** Show the branch that an item is on. */
export async function showBranch(item) {
  const head = tree.value.leafBelow(item.id);
  tree.value = tree.value.withHead(head);
  try {
    conversation.value = await call("POST", `/v1/conversations/${openId.value}`, { head });
  } catch (error) {
    fail(error);
  }
}

export async function changeSettings(changed) {
  settings.value = { ...settings.value, ...changed };
  if (!openId.value) return;
  const metadata = metadataOf(settings.value, conversation.value?.metadata);
  conversation.value = await call("POST", `/v1/conversations/${openId.value}`, { metadata });
}

/** The ids of the images of a message. */
export const imagesOf = (item) => (item.content ?? []).filter(({ type }) => type === "input_image").map((part) => part.file_id);
export const imagePath = (id) => at(`/v1/conversations/${openId.value}/images/${id}`);

export const textOf = (item) => item.content?.map((part) => part.text ?? "").join("") ?? item.output ?? item.arguments ?? "";

// Asking

/** Ask behind an item, or at the beginning where that is null. Without a text, the answer to what stands there is given
 * anew, or goes on. `images` are ids of images that the server has, `pictures` are sent first. Returns whether the server
 * has the question. */
export async function ask(parentId, text = null, { modelId = null, images = [], pictures = [] } = {}) {
  if (isBusy.value) return false;
  alarm.value = "";
  const chosen = settings.value;
  const question = { key: randomName(), conversationId: openId.value, parentId, text, modelId, images, settings: chosen };
  return send(question, pictures);
}

async function send(question, pictures = []) {
  const hurry = new AbortController();
  keepQuestion({ ...question, numUnsent: pictures.length }); // after a reload it is asked again, under the same key
  asking.value = { ...question, pictures, state: signal("sending"), stop: () => hurry.abort() };
  try {
    if (!question.conversationId) await begin(question, hurry.signal, pictures.length > 0);
    if (pictures.length) keepQuestion({ ...question, numUnsent: pictures.length });
    await sendPictures(question, pictures, hurry.signal);
    keepQuestion(question);
    if (question.settings.tools.length) {
      await askWithTools(toolsBodyOf(question), question.key, question.conversationId, hurry.signal);
      loadList().catch(() => {});
      return true;
    }
    if (response.value) {
      forgetResponse();
      await keepResponse(question.conversationId, "");
    }
    const headers = { "idempotency-key": question.key };
    const asked_ms = performance.now();
    const created = await untilReached(
      () => call("POST", "/v1/streams", bodyOf(question), { headers, wait_ms: 120_000 }),
      hurry.signal,
    );
    if (openId.value === question.conversationId) {
      const before = tree.value.items.get(question.parentId);
      const isLonger = question.text === null && before?.role === "assistant" && before.content[0].text.trim() !== "";
      const answer = follow(created.id, isLonger ? textOf(before) : "", { asked_ms, model: created.model });
      live.value = new Map(live.value).set(created.id, answer);
      await load();
    }
    if (hurry.signal.aborted) live.value.get(created.id)?.stop();
    loadList().catch(() => {});
    return true;
  } catch (error) {
    if (error !== STOPPED) fail(error);
    return question.text === null;
  } finally {
    keepQuestion(null);
    asking.value = null;
  }
}

/** Create the conversation of a first question, together with it: so it stays if the page is closed now. */
async function begin(question, hurry, hasPictures) {
  const items = hasPictures ? [] : [{ role: "user", content: question.text }]; // with images, it comes after them
  const body = { metadata: metadataOf(question.settings), items };
  const made = await untilReached(() => call("POST", "/v1/conversations", body), hurry);
  Object.assign(question, { conversationId: made.id, parentId: made.head, ...(!hasPictures && { text: null }) });
  const isShown = !openId.value;
  batch(() => {
    asking.value = { ...asking.value, ...question };
    if (!isShown) return;
    openId.value = made.id;
    conversation.value = made;
    if (hasPictures) return;
    const item = { id: made.head, type: "message", role: "user", parent_id: null, content: [{ text: items[0].content }] };
    tree.value = new Tree([item], made.head);
  });
  if (isShown) history.pushState(null, "", `#${made.id}`);
  loadList().catch(() => {});
}

/** Send the images of a question, one after the other. Throws: as `untilReached`. */
async function sendPictures(question, pictures, hurry) {
  const path = `/v1/conversations/${question.conversationId}/images`;
  for (const [place, { blob }] of pictures.entries()) {
    const { state } = asking.value;
    state.value = pictures.length > 1 ? `Sending image ${place + 1} of ${pictures.length}…` : "Sending the image…";
    const sent = await untilReached(() => call("POST", path, blob, { wait_ms: 120_000 }), hurry);
    if (hurry.aborted) throw STOPPED;
    question.images = [...question.images, sent.id];
  }
  if (pictures.length) asking.value.state.value = "sending";
}

const STOPPED = new Error("stopped");

/** Again and again, unless somebody stops it. Throws: Refusal, STOPPED. */
async function untilReached(act, hurry) {
  for (let pause_ms = 1000; ; pause_ms = Math.min(2 * pause_ms, 8000)) {
    try {
      return await act();
    } catch (error) {
      if (error.status !== undefined) throw error;
      if (hurry.aborted) throw STOPPED;
      asking.value.state.value = "unreachable";
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, pause_ms);
        hurry.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
      });
      if (hurry.aborted) throw STOPPED;
    }
  }
}

/** What a user has chosen for answers. `limit` is the wire's name for the longest answer. */
function choicesOf(chosen, modelId, limit) {
  const name = modelId ?? chosen.model;
  return {
    ...(chosen.system && { instructions: chosen.system }),
    ...(models.value.some(({ id }) => id === name) && { model: name }),
    temperature: chosen.temperature,
    top_p: chosen.top_p,
    ...(chosen.max_tokens && { [limit]: chosen.max_tokens }),
  };
}

function bodyOf({ conversationId, parentId, text, modelId, images = [], settings: chosen }) {
  return {
    conversation: { id: conversationId, parent_id: parentId },
    messages: text === null ? [] : [{ role: "user", content: contentOf(text, images) }],
    ...choicesOf(chosen, modelId, "max_tokens"),
    linger_s: 3600, // it is kept in the conversation, whoever waits for it
  };
}

function toolsBodyOf({ conversationId, parentId, text, modelId, images = [], settings: chosen }) {
  const parts = images.map((id) => ({ type: "input_image", file_id: id }));
  const content = images.length ? [...parts, ...(text ? [{ type: "input_text", text }] : [])] : text;
  return {
    ...responseOf(chosen, modelId),
    conversation: { id: conversationId, parent_id: parentId },
    input: text === null ? [] : [{ role: "user", content }],
  };
}

function responseOf(chosen, modelId) {
  return {
    tools: toolsOf(chosen.tools),
    background: true,
    ...choicesOf(chosen, modelId, "max_output_tokens"),
  };
}

function contentOf(text, images) {
  if (!images.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/** A question that was on its way when the page was left. Its images are gone with the page, if they were not sent. */
async function resendQuestion() {
  const question = recallQuestion();
  if (!question?.numUnsent) return question && send(question);
  keepQuestion(null);
  unsentText.value = question.text;
  alarm.value = "The images of your last message were not sent. Attach them again.";
  return false;
}

export function stop() {
  asking.value?.stop();
  running.value?.stop();
  stopResponse();
}

addEventListener("hashchange", () => {
  if (location.hash.slice(1) !== openId.value) open(location.hash.slice(1)).catch(fail);
});

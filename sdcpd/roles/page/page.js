"use strict";

// The chat: what is typed becomes a request, what is streamed becomes an answer.

import { Answer, element, keepAtEnd } from "./page-answer.js";
import { Live } from "./page-live.js";
import { ask, chat, useKey } from "./page-requests.js";

const find = (id) => document.getElementById(id);
const [input, messages] = [find("input"), find("messages")];

let turns = []; // what was said, as the model gets it
let running = null; // aborts the answer that is being written
let modelsKnown = false;

const live = new Live({ needsKey, answered: () => modelsKnown || models() });

// ---- asking

function request() {
  const body = {
    messages: turns,
    temperature: Number(find("temperature").value),
    stream: true,
    stream_options: { include_usage: true, include_speculation: true },
  };
  if (find("model").value) body.model = find("model").value;
  if (find("max-tokens").value) body.max_tokens = Number(find("max-tokens").value);
  if (find("seed").value) body.seed = Number(find("seed").value);
  return body;
}

async function say(text) {
  find("welcome").hidden = true;
  turns.push({ role: "user", content: text });
  add(element("article", { text, kind: "message user" })).ariaLabel = "You";
  const answer = new Answer();
  add(answer.element);
  const mine = new AbortController();
  busy(mine);
  try {
    const speculation = find("speculation").checked;
    for await (const chunk of chat(request(), { speculation, signal: mine.signal })) {
      keepAtEnd(messages, () => answer.take(chunk));
    }
  } catch (error) {
    failed(answer, error, text);
  }
  keepAtEnd(messages, () => answer.end());
  // Another chat may have begun meanwhile, to which this answer is nothing.
  if (running !== mine) return;
  busy(null);
  if (answer.text) turns.push({ role: "assistant", content: answer.text });
  else turns.pop();
}

function failed(answer, error, text) {
  if (error.name === "AbortError") {
    answer.fail("Stopped.");
    return;
  }
  if (error.status === 401) needsKey(error.message);
  answer.fail(error.message);
  // It was not answered, so it is there to be sent again.
  if (!answer.text && !input.value) input.value = text;
}

function busy(controller) {
  running = controller;
  find("send").hidden = Boolean(controller);
  find("stop").hidden = !controller;
}

function submit() {
  const text = input.value.trim();
  if (running || !text || !find("ask").reportValidity()) return;
  input.value = "";
  say(text);
}

function stop() {
  running?.abort();
  input.focus();
}

function fresh() {
  const last = running;
  busy(null);
  last?.abort();
  turns = [];
  messages.replaceChildren(find("welcome"));
  find("welcome").hidden = false;
  input.focus();
}

function add(one) {
  messages.append(one);
  messages.scrollTop = messages.scrollHeight;
  return one;
}

// ---- models and the key

async function models() {
  try {
    const { data } = await ask("v1/models");
    find("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
    modelsKnown = true;
    find("key-form").hidden = true;
    find("key").value = "";
  } catch (error) {
    if (error.status === 401) needsKey(error.message);
  }
}

function needsKey(sentence) {
  const form = find("key-form");
  const tried = find("key").value !== "";
  find("key-trouble").textContent = sentence;
  find("key-trouble").hidden = !tried;
  if (form.hidden) {
    form.hidden = false;
    find("key").focus();
  }
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(find("key").value);
  models();
  live.begin();
});

// ---- keys and buttons

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) stop();
});
find("stop").addEventListener("click", stop);
find("fresh").addEventListener("click", fresh);
for (const example of document.querySelectorAll(".examples button")) {
  example.addEventListener("click", () => {
    input.value = example.textContent;
    submit();
  });
}
models();
live.begin();

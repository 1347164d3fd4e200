"use strict";

// What the page asks of the server. Addresses are relative: the page may lie behind a proxy's path.

const KEY = "sdcpd-api-key";
let key = remembered();

// A sentence for the person at the page; `status` is the answer's, 0 where there was none.
export class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function remembered() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // a browser that forbids storage asks for the key after every reload
  }
}

export function useKey(value) {
  key = value.trim();
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // see remembered()
  }
}

async function send(path, options) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new Refused("The server did not answer in time.");
    throw new Refused("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let said = "";
  try {
    said = (await response.json()).error.message;
  } catch {
    // not one of our answers: a proxy's, for example
  }
  const words = said || `The server answered ${response.status} ${response.statusText}.`;
  return new Refused(words, response.status);
}

export async function ask(path) {
  const response = await send(path, { signal: AbortSignal.timeout(10_000) });
  return response.json();
}

// The chunks of a streamed chat as they come; throws Refused, and AbortError where `signal` says so.
export async function* chat(body, { speculation, signal }) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: {
      "content-type": "application/json",
      "x-sdcp-speculation": speculation ? "on" : "off",
    },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message, response.status);
    yield chunk;
  }
  throw new Refused("The stream ended before the text did.");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await readFrom(reader);
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // already over where the stream was aborted
  }
}

async function readFrom(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The connection to the server was lost.");
  }
}

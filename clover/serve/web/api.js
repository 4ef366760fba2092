// What the page says to its server: requests, the key, and server-sent events.

const KEY = "clover-key";

/** An answer that is an error, or no answer at all (status 0). */
export class ServerError extends Error {
  constructor(status, message, retrySeconds = null) {
    super(message);
    this.status = status;
    this.retrySeconds = retrySeconds;
  }
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Returns the names of the models that are served. */
export async function listModels() {
  const { data } = await (await request("v1/models")).json();
  return data.map((model) => model.id);
}

/** Returns whether the server answers. */
export async function isHealthy() {
  try {
    return (await fetch("health", { cache: "no-store" })).ok;
  } catch {
    return false;
  }
}

/** Yields the chunks of a streamed chat completion up to its end. */
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of readEvents(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(503, chunk.error.message);
    yield chunk;
  }
  throw new ServerError(0, "the connection was lost before the end of the answer");
}

async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    throw asServerError(error);
  }
  if (response.ok) return response;
  const text = await response.text();
  const retry = response.headers.get("retry-after");
  throw new ServerError(response.status, readMessage(text), retry && Number(retry));
}

function readMessage(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || "the server gave no reason"; // what a proxy says is not ours
  }
}

async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw asServerError(error);
    }
    if (part.done) return;
    const events = (buffer + part.value).split("\n\n");
    buffer = events.pop();
    for (const event of events) yield event.replace(/^data: /, "");
  }
}

function asServerError(error) {
  return error.name === "AbortError" ? error : new ServerError(0, "the server cannot be reached");
}

// One answer on the page: thinking, text, the canvas at work, calls.

const SLOW_MILLISECONDS = 160; // per pass, in slow motion
const FRAME_MILLISECONDS = 16;
const PLACEHOLDER_CELLS = 12;
const MASKS = { cells: Array(PLACEHOLDER_CELLS).fill(null), confidences: [], held: "" };

/** Returns an element with a class and text. */
export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

export class Answer {
  /**
   * @param {{isThinking: boolean, isSlow: () => boolean, onPaint: () => void}} options
   */
  constructor({ isThinking, isSlow, onPaint }) {
    this.element = make("article", "turn answer");
    this.message = { role: "assistant", content: "", reasoning: "", tool_calls: [] };
    this.isSlow = isSlow;
    this.onPaint = onPaint;
    this.chunks = []; // that have come and are not painted
    this.hasCanvas = false; // one that shows canvases has one for each pass, else a delta is a pass

    this.thinking = make("details", "thinking");
    this.thinking.open = true;
    this.summary = make("summary", "", "Thinking");
    this.thought = make("div", "text");
    this.thinking.append(this.summary, this.thought);
    this.thinking.hidden = true;
    this.content = make("div", "text");
    this.calls = make("form", "calls");
    this.element.append(this.thinking, this.content, this.calls);

    // A screen reader hears what is final
    this.canvas = make("span", "canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.isThinking = isThinking;
    if (isThinking) this.thinking.hidden = false;
    (isThinking ? this.thought : this.content).append(this.canvas);
    this.paintCanvas(MASKS);
  }

  push(chunk) {
    this.chunks.push(chunk);
    this.timer ??= setTimeout(() => this.paint(), FRAME_MILLISECONDS);
  }

  /** Resolves once all that was pushed is painted. */
  async end(note = "") {
    if (this.chunks.length) await new Promise((resolve) => (this.onDrained = resolve));
    this.canvas.remove();
    this.closeThinking();
    if (note) this.element.append(make("p", "note", note));
    this.onPaint();
  }

  /** Paints all that has come, or in slow motion what one pass gave; then stands for a while. */
  paint() {
    this.timer = null;
    if (!this.chunks.length) return;
    const isSlow = this.isSlow();
    let isPass = false;
    while (this.chunks.length && !(isSlow && isPass)) {
      const chunk = this.chunks.shift();
      this.apply(chunk);
      isPass = Boolean(chunk.canvas) || (!this.hasCanvas && !chunk.choices[0]?.delta.role);
    }
    this.timer = setTimeout(() => this.paint(), isSlow ? SLOW_MILLISECONDS : FRAME_MILLISECONDS);
    this.onPaint();
    if (!this.chunks.length) this.onDrained?.();
  }

  /** Paints at once what slow motion would still show. */
  hurry() {
    clearTimeout(this.timer);
    this.isSlow = () => false;
    this.paint();
  }

  apply({ canvas, choices }) {
    if (canvas) {
      this.hasCanvas = true;
      this.paintCanvas(canvas);
      return;
    }
    const delta = choices[0]?.delta ?? {};
    if (delta.reasoning) this.write("reasoning", this.thought, delta.reasoning);
    if (delta.content || delta.tool_calls) this.closeThinking();
    if (delta.content) this.write("content", this.content, delta.content);
    for (const call of delta.tool_calls ?? []) this.addCall(call);
  }

  write(field, target, text) {
    this.message[field] += text;
    if (field === "reasoning") this.thinking.hidden = false;
    this.paintCanvas({ cells: [], confidences: [], held: "" });
    const fresh = make("span", "fresh", text);
    fresh.addEventListener("animationend", () => {
      fresh.replaceWith(text);
      target.normalize();
    });
    if (this.canvas.parentNode === target) this.canvas.before(fresh);
    else target.append(fresh, this.canvas);
  }

  /** Folds the thinking once something else is said. */
  closeThinking() {
    if (!this.isThinking) return;
    this.isThinking = false;
    this.thinking.open = false;
    this.summary.textContent = "Thought";
    this.thinking.hidden = !this.message.reasoning;
    if (this.canvas.isConnected) this.content.append(this.canvas);
  }

  addCall({ index, id, function: called }) {
    const calls = this.message.tool_calls;
    if (id) calls[index] = { id, type: "function", function: { name: called.name, arguments: "" } };
    calls[index].function.arguments += called.arguments;
    this.paintCanvas({ cells: [], confidences: [], held: "" });
    const card = makeCard(calls[index].function);
    if (this.calls.children[index]) this.calls.children[index].replaceWith(card);
    else this.calls.append(card);
  }

  /** Shows the cells, and before them what is final and held back until it is whole. */
  paintCanvas({ cells, confidences, held }) {
    const first = this.canvas.firstElementChild;
    const heldText = first?.className === "held" ? first : null;
    if (heldText) heldText.textContent = held;
    else if (held) this.canvas.prepend(make("span", "held", held));
    const tiles = this.canvas.getElementsByClassName("cell");
    while (tiles.length > cells.length) tiles[tiles.length - 1].remove();
    while (tiles.length < cells.length) this.canvas.append(make("span", "cell"));
    cells.forEach((cell, index) => paintCell(tiles[index], cell, confidences[index] ?? 1));
  }
}

function paintCell(tile, cell, confidence) {
  const className = cell === null ? "cell" : "cell filled";
  const text = (cell ?? "").replaceAll("\n", "↵");
  if (tile.className !== className) tile.className = className;
  if (tile.textContent !== text) tile.textContent = text;
  if (cell !== null) tile.style.setProperty("--sure", confidence.toFixed(3));
}

function makeCard({ name, arguments: text }) {
  const card = make("article", "card");
  const list = make("dl");
  for (const [key, value] of Object.entries(readArguments(text))) {
    const shown = typeof value === "string" ? value : JSON.stringify(value);
    list.append(make("dt", "", key), make("dd", "", shown));
  }
  card.append(make("h3", "", name), list);
  return card;
}

/** Arguments come in pieces: until they are whole they are not JSON. */
function readArguments(text) {
  try {
    return JSON.parse(text);
  } catch {
    return {};
  }
}

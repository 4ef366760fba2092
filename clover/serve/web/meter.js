// What an answer has cost so far, and at its end.

export class Meter {
  constructor() {
    this.started = performance.now();
    this.ended = null;
    this.tokens = 0;
    this.passes = 0;
    this.previews = 0;
    this.blocks = 0;
    this.lastStart = null; // where the last canvas began, in tokens of the answer
  }

  /** Counts a chunk as it arrives. Until usage comes, what is on the canvas counts as written. */
  count({ canvas, choices, usage }) {
    if (canvas) {
      this.previews += 1;
      this.passes += 1;
      this.blocks += canvas.start !== this.lastStart;
      this.lastStart = canvas.start;
      this.tokens = canvas.start + canvas.cells.filter((cell) => cell !== null).length;
    } else if (usage) {
      this.tokens = usage.completion_tokens;
      this.passes = usage.passes;
    } else if (this.previews === 0 && says(choices[0])) {
      this.tokens += 1; // without a canvas a pass gives one token, and that one delta
      this.passes += 1;
    }
  }

  end() {
    this.ended ??= performance.now();
  }

  get seconds() {
    return ((this.ended ?? performance.now()) - this.started) / 1000;
  }

  get speed() {
    return this.tokens / Math.max(this.seconds, 0.001);
  }

  get tpf() {
    return this.passes ? this.tokens / this.passes : null;
  }

  get previewsPerBlock() {
    return this.blocks ? this.previews / this.blocks : null;
  }

  get summary() {
    const parts = [`${this.tokens} tokens`, `${round(this.seconds)} s`, `${round(this.speed)} tokens/s`];
    if (this.tpf) parts.push(`${round(this.tpf)} per pass`);
    return parts.join(" · ");
  }
}

/** Returns a number with about three digits. */
export function round(value) {
  if (value === null) return "–";
  return value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);
}

function says(choice) {
  const { content, reasoning, tool_calls: calls } = choice?.delta ?? {};
  return Boolean(content || reasoning || calls);
}

"use strict";

// One answer: its text, its strip of rounds, and its figures. Text goes in as text, never as HTML.

const NEAR_END_PX = 60;

export function element(name, { text, title, kind } = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (title) made.title = title;
  if (kind) made.className = kind;
  return made;
}

// Pairs of a name and a figure; `title` says how the figure is meant.
export function fill(list, entries) {
  list.replaceChildren(
    ...entries.map(([name, value, title]) => {
      const pair = element("div", { title });
      pair.append(element("dt", { text: name }), element("dd", { text: value }));
      return pair;
    }),
  );
}

// Let a list grow; whoever has scrolled back in it is left there.
export function keepAtEnd(list, grow) {
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END_PX;
  grow();
  if (atEnd) list.scrollTop = list.scrollHeight;
}

export class Answer {
  constructor() {
    const template = document.getElementById("answer-template");
    this.element = template.content.firstElementChild.cloneNode(true);
    const find = (selector) => this.element.querySelector(selector);
    this.parts = {
      text: find(".text"),
      trouble: find(".trouble"),
      strip: find(".strip"),
      caption: find(".caption"),
      rounds: find(".rounds"),
      figures: find(".figures"),
    };
    this.parts.text.ariaBusy = "true"; // read out once it is whole, not piece by piece
    this.text = "";
    this.rounds = 0;
    this.usage = null;
    this.begun = performance.now();
    this.firstToken = null;
    this.lastToken = null;
  }

  take(chunk) {
    const piece = chunk.choices?.[0]?.delta?.content;
    const rounds = chunk.sdcp?.rounds ?? [];
    if (piece || rounds.length) {
      this.lastToken = performance.now();
      this.firstToken ??= this.lastToken;
    }
    if (piece) {
      this.text += piece;
      this.parts.text.append(piece);
    }
    for (const round of rounds) this.addRound(round);
    if (chunk.usage) this.usage = chunk.usage;
  }

  addRound(round) {
    this.rounds += 1;
    this.parts.strip.hidden = false;
    this.parts.caption.textContent = this.rounds === 1 ? "1 round" : `${this.rounds} rounds`;
    keepAtEnd(this.parts.rounds, () => this.parts.rounds.append(bracket(round, this.rounds)));
  }

  end() {
    this.parts.text.ariaBusy = "false";
    fill(this.parts.figures, this.figures());
    this.parts.figures.hidden = this.parts.figures.childElementCount === 0;
  }

  fail(sentence) {
    this.parts.trouble.textContent = sentence;
    this.parts.trouble.hidden = false;
  }

  // Where the stream was stopped there is no usage, and only the times are known.
  figures() {
    const shown = [];
    const usage = this.usage;
    const details = usage?.completion_tokens_details ?? {};
    const accepted = details.accepted_prediction_tokens ?? 0;
    const drafted = accepted + (details.rejected_prediction_tokens ?? 0);
    if (usage) shown.push(["tokens", String(usage.completion_tokens), "Tokens of this answer"]);
    if (usage?.sdcp) {
      const { tokens_per_pass: perPass, rounds, self_decoded: alone } = usage.sdcp;
      const passes = `${rounds} rounds and ${alone} tokens decoded alone`;
      shown.push(["tokens per pass", perPass.toFixed(2), `Passes of the target: ${passes}`]);
    }
    if (drafted) {
      const title = `${accepted} of ${drafted} drafted tokens were kept`;
      shown.push(["accepted", `${Math.round((100 * accepted) / drafted)} %`, title]);
    }
    if (this.firstToken !== null) {
      const title = "Time from sending to the first token";
      shown.push(["to first token", duration(this.firstToken - this.begun), title]);
    }
    const seconds = (this.lastToken - this.begun) / 1000;
    if (usage && this.lastToken !== null) {
      const title = `Tokens by the time from sending to the last one, ${seconds.toFixed(2)} s`;
      shown.push(["tokens/s", rate(usage.completion_tokens / seconds), title]);
    }
    return shown;
  }
}

function bracket(round, number) {
  const alone = round.self_decoded;
  const made = element("span", { kind: alone ? "round alone" : "round" });
  const add = (name, kind, text, title) => {
    if (text) made.append(element(name, { text: shown(text), kind, title: `Round ${number}: ${title}` }));
  };
  add("span", "accepted", round.accepted, "proposed by the drafter and kept");
  add("del", "rejected", round.rejected, "proposed by the drafter and not kept");
  if (alone) add("i", "self", round.own, "no draft, the verifier decoded alone");
  else add("b", "own", round.own, "the verifier's own token");
  return made;
}

function shown(text) {
  return text.replaceAll("\n", "↵");
}

function rate(perSecond) {
  return perSecond.toFixed(perSecond < 100 ? 1 : 0);
}

function duration(milliseconds) {
  return milliseconds < 1000
    ? `${Math.round(milliseconds)} ms`
    : `${(milliseconds / 1000).toFixed(2)} s`;
}

"use strict";

// What the router knows, asked for every two seconds while somebody can see it.

import { element, fill } from "./page-answer.js";
import { ask } from "./page-requests.js";

const EVERY_MS = 2_000;
const AT_MOST_MS = 30_000;
const HERE = ["ready", "loading"];
// The router's counts in words for people; verifiers' events have their names from the draft.
const COUNTS = {
  sessions: "texts begun",
  event_reduce: "shorter proposals asked for",
  event_switch: "another drafter asked for",
  event_self_decode: "went on without a drafter",
  event_finish: "finished",
  event_fail: "failed or stopped",
};

const find = (id) => document.getElementById(id);

export class Live {
  constructor({ needsKey, answered }) {
    this.needsKey = needsKey;
    this.answered = answered;
    this.timer = null;
    this.running = false;
    this.pause = EVERY_MS;
    this.stopped = false;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.begin();
    });
  }

  // Ask now, and go on from there.
  begin() {
    this.pause = EVERY_MS;
    this.stopped = false;
    this.poll();
  }

  async poll() {
    clearTimeout(this.timer);
    if (this.running || this.stopped || document.hidden) return;
    this.running = true;
    try {
      show(await ask("v1/sdcp/status"));
      this.pause = EVERY_MS;
      this.answered();
    } catch (error) {
      this.fail(error);
    } finally {
      this.running = false;
    }
    this.timer = setTimeout(() => this.poll(), this.pause);
  }

  fail(error) {
    if (error.status === 401) {
      this.stopped = true; // goes on when there is a key
      this.needsKey(error.message);
      say("These figures need a key.");
      state("waiting", "needs a key");
      return;
    }
    this.pause = Math.min(AT_MOST_MS, 2 * this.pause);
    say(`${error.message} What is shown is old; next try in ${this.pause / 1000} s.`);
    if (error.status === 0) state("lost", "no answer");
  }
}

function say(sentence) {
  const trouble = find("live-trouble");
  trouble.textContent = sentence;
  trouble.hidden = !sentence;
  document.body.classList.toggle("stale", Boolean(sentence));
}

function state(name, words, title = "") {
  const shown = find("state");
  if (shown.textContent !== words) shown.textContent = words; // said again it would be read again
  shown.dataset.state = name;
  shown.title = title;
}

function show(status) {
  say("");
  state(status.ready ? "ready" : "unready", status.ready ? "ready" : `not ready: ${status.reason}`);
  find("about").textContent = `${status.model} · ${status.version}`;
  const all = status.instances;
  fill(find("figures"), [
    ["sessions", String(status.sessions), "Texts that are being written now"],
    ["verifiers", ready(all, "verifier"), "Ready, of those that have not left"],
    ["drafters", ready(all, "drafter"), "Ready, of those that have not left"],
  ]);
  find("instances").replaceChildren(...[...all].sort(order).map(instance));
  const counted = Object.keys({ ...COUNTS, ...status.counts }).filter((name) => status.counts[name]);
  find("since").hidden = counted.length === 0;
  fill(
    find("counts"),
    counted.map((name) => [COUNTS[name] ?? name.replaceAll("_", " "), String(status.counts[name])]),
  );
}

function ready(instances, role) {
  const of = instances.filter((one) => one.role === role && one.state !== "gone");
  return `${of.filter((one) => one.state === "ready").length} / ${of.length}`;
}

function order(one, other) {
  const rank = (it) => (it.state === "gone" ? 2 : 0) + (it.role === "verifier" ? 0 : 1);
  return rank(one) - rank(other) || one.instance.localeCompare(other.instance);
}

function instance(one) {
  const made = element("li");
  made.dataset.state = one.state;
  const name = element("p", { kind: "name" });
  name.append(
    element("b", { text: one.instance }),
    element("span", { text: one.role, kind: "role" }),
    element("span", { text: one.state, kind: "state" }),
  );
  name.lastChild.dataset.state = one.state;
  made.append(name);
  if (HERE.includes(one.state)) made.append(load(one));
  const figures = element("dl", { kind: "figures" });
  fill(figures, said(one));
  made.append(figures);
  return made;
}

function load(one) {
  const made = element("meter", { title: `load ${one.load} %` });
  made.ariaLabel = "load";
  made.max = 100;
  made.value = one.load;
  return made;
}

function said(one) {
  const here = HERE.includes(one.state);
  return [
    ["load", here ? `${one.load} %` : "–", "As it reports it"],
    ["queue", here ? String(one.queue) : "–", "Sessions that wait there"],
    ["accepted", one.accept === null ? "–" : `${Math.round(100 * one.accept)} %`, "Of its proposals"],
    ["sessions", String(one.sessions), "That the router has given it"],
    ["seen", `${one.seen_s.toFixed(1)} s`, "Time since its last report"],
  ];
}

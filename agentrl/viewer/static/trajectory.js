/* The page of a trajectory: facts, rewards, messages, calls, time line. */
"use strict";

const MAX_THUMBNAIL = 256;

const tokenView = { isOpen: false, color: "mask" };

async function trajectoryPage(at) {
  const parameters = { run: runNumber(), id: at.id };
  const [one, other] = await Promise.all([get("trajectory", parameters),
    at.with ? get("trajectory", { run: runNumber(), id: at.with }) : null]);
  const around = one.around;
  const to = (id) => { if (id) go("trajectory", { run: at.run, id }); };
  const button = (name, key, id) => h("button", { disabled: !id, onclick: () => to(id), title: `Key ${key}` }, name);
  const tokens = h("section", { id: "tokens" });
  const toggle = h("button", { "aria-pressed": tokenView.isOpen, onclick: () => flip() }, "Tokens");
  const flip = () => {
    tokenView.isOpen = !tokenView.isOpen;
    toggle.setAttribute("aria-pressed", tokenView.isOpen);
    if (tokenView.isOpen) fillTokens(tokens, parameters, one); else tokens.replaceChildren();
  };
  const compare = h("select", { id: "compare", onchange: (e) => go("trajectory", { run: at.run, id: at.id, with: e.target.value }) },
    h("option", { value: "" }, "none"),
    one.group.filter((sample) => sample.id !== one.id).map((sample) => h("option", { value: sample.id, selected: sample.id === at.with },
      `sample ${sample.sample}, reward ${fixed(sample.reward, 2)}`)));
  return {
    title: one.request_id,
    keys: { j: () => to(around.next), k: () => to(around.previous), "[": () => to(around.worse), "]": () => to(around.better),
      t: flip, Escape: () => { location.hash = lastList || link("list", { run: at.run, file: one.file }); } },
    draw: () => { scrollTo(0, 0); if (tokenView.isOpen) fillTokens(tokens, parameters, one); },
    content: [
      h("div", { class: "bar" }, h("a", { href: link("list", { run: at.run, file: one.file }) }, one.file),
        button("← Before", "k", around.previous), button("Next →", "j", around.next),
        button("Next worse", "[", around.worse), button("Next better", "]", around.better), toggle,
        h("label", {}, "Next to ", compare)),
      facts(one), groupLine(one, at), ...rowLine(one, at), tokens,
      other ? h("div", { class: "pair" }, [one, other].map((sample) => conversation(sample, h("h2", {}, sampleLink(sample, at)))))
        : conversation(one)],
  };
}

const sampleLink = (one, at) => h("a", { href: link("trajectory", { run: at.run, id: one.id }) },
  `Sample ${one.sample}: reward ${fixed(one.reward, 3)}, ${one.end || "no end"}`);

function facts(one) {
  const rows = [["Request", one.request_id], ["Step", num(one.step)], ["Source", one.source],
    ["Reward", fixed(one.reward, 4)], ["Advantage", fixed(one.advantage, 4)], ["End", one.end],
    ["Turns", num(one.turns)], ["Response", `${num(one.tokens)} tokens, ${num(one.trained)} trained`],
    ["Duration", seconds(one.seconds)], ["Ground truth", one.ground_truth === null ? "–" : shorten(asText(one.ground_truth), 200)]];
  const lines = [h("dl", { class: "facts" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))];
  if (one.error) lines.push(h("p", { class: "bad" }, `${one.error.fault}: ${one.error.kind}: ${shorten(one.error.message, 2000)}`));
  if (one.dropped) lines.push(h("p", { class: "warn" }, `Not trained: ${one.dropped}`));
  return h("div", {}, lines);
}

const groupLine = (one, at) => h("div", { class: "bar" }, h("span", { class: "dim" }, `Group ${one.uid}`),
  h("div", { class: "chips" }, one.group.map((sample) => chip(sample, at.run, sample.id === one.id))));

function rowLine(one, at) {
  if (!one.same_row.length) return [];
  const chips = one.same_row.map((other) => h("a", { class: "chip", href: link("trajectory", { run: at.run, id: other.id }), title: other.end },
    `step ${other.step}: ${fixed(other.reward, 2)}`));
  return [h("details", { id: "same-row" }, h("summary", {}, `The same prompt in other steps (${one.same_row.length === 100 ? "first 100" : one.same_row.length})`),
    h("div", { class: "chips" }, chips))];
}

function rewardParts(one) {
  const rows = [];
  for (const [name, value] of Object.entries(one.rewards)) {
    if (value === null || value === undefined) continue;
    if (typeof value === "object") for (const [key, part] of Object.entries(value)) rows.push([`${name}.${key}`, part]);
    else rows.push([name, value]);
  }
  one.sequences.forEach((sequence) => sequence.turns.forEach((turn) => {
    if (turn.reward !== null) rows.push([`turn ${turn.index} (${turn.role})`, turn.reward]);
  }));
  return [h("h2", {}, "Reward and its parts"), tableOf([["Part", ([name]) => name],
    ["Value", ([, value]) => (typeof value === "number" ? num(value) : shorten(asText(value), 300)), true]], rows, "It was not scored.", { class: "rewards" })];
}

/** Show the time line, the messages and the parts of the reward; `heading` if it is next to another one. */
function conversation(one, heading) {
  const parts = one.sequences.flatMap((sequence, i) => [
    one.sequences.length > 1 ? h("h2", {}, `Sequence ${i + 1} of ${one.sequences.length}${sequence.cause ? `: ${sequence.cause}` : ""}`) : h("h2", {}, "Conversation"),
    ...messagesOf(sequence, one.file), ...sequence.pictures.map((picture) => pictureOf(picture, one.file))]);
  return h("section", { class: "conversation" }, heading, h("h2", {}, "Time line"), timeline(one), parts, rewardParts(one));
}

const KINDS = {
  pending: "pending", running: "running", tool_calling: "tool calling", interacting: "interacting", scoring: "scoring",
  other: "other", queue: "call in a queue", work: "call at work",
};

/** Show the states of a request over time, and its tool calls below: `[kind, start, seconds, note]`. */
function timeline(one) {
  const line = one.timeline, percent = (value) => `${(100 * value) / line.seconds}%`;
  const bar = ([kind, start, length, note]) => {
    const span = h("span", { class: `kind-${kind}`, title: `${KINDS[kind]}${note ? `, ${note}` : ""}: ${seconds(length)}, from ${seconds(start)}` },
      length > 0.08 * line.seconds ? seconds(length) : "");
    span.style.left = percent(start);
    span.style.width = percent(length);
    return span;
  };
  const lanes = (name, all) => all.map((bars, i) => h("div", { class: `lane ${name}` }, h("b", {}, i ? "" : name), h("div", { class: "track" }, bars.map(bar))));
  const axis = h("div", { class: "track" }, ticks(0, line.seconds, 8).map((at) => {
    const mark = h("i", {}, `${axisNumber(at)} s`);
    mark.style.left = percent(at);
    return mark;
  }));
  return h("div", { class: "timeline" }, lanes("states", line.states), lanes("calls", line.calls), h("div", { class: "lane axis" }, h("b", {}), axis),
    h("div", { class: "legend" }, Object.keys(KINDS).filter((kind) => line.totals[kind] > 0).map((kind) => h("span", {},
      h("i", { class: `swatch kind-${kind}` }), `${KINDS[kind]} ${seconds(line.totals[kind])}`)),
    h("span", {}, `${one.state} after ${seconds(line.ended)}`), line.notes.map((note) => h("span", { class: "warn" }, note))));
}

/** Show messages; the last ones of the assistant are the sampled turns. */
function messagesOf(sequence, file) {
  const sampled = sequence.turns.filter((turn) => turn.role === "assistant");
  const spoken = sequence.messages.filter((message) => message.role === "assistant").length;
  let at = sampled.length - spoken;
  return sequence.messages.map((message) => {
    const turn = message.role === "assistant" ? sampled[at++] : null;
    const head = [h("b", {}, message.role + (message.name ? ` ${message.name}` : ""))];
    if (turn) {
      const versions = [...new Set(turn.weight_versions.map(([version]) => version))];
      head.push(h("span", {}, `${num(turn.end - turn.start)} tokens`), h("span", {}, seconds(turn.seconds)),
        h("span", {}, `weights ${versions.join(", ") || "unknown"}`), h("span", {}, `finish ${turn.finish_reason}`));
      if (turn.excluded) head.push(h("span", { class: "warn" }, `not trained: ${turn.excluded}`));
      if (turn.cut) head.push(h("span", { class: "warn" }, `cut by the budget of: ${turn.cut}`));
      if (turn.reward !== null) head.push(h("span", {}, `reward ${num(turn.reward)}`));
    }
    const calls = turn ? turn.calls.map(callBlock) : (message.tool_calls || []).map((call) => h("pre", { class: "call" }, asText(call)));
    return h("div", { class: `message ${["assistant", "tool", "user"].includes(message.role) ? message.role : ""}` },
      h("div", { class: "head" }, head), contentOf(message.content, file), calls);
  });
}

function contentOf(content, file) {
  if (content === null || content === "") return null;
  if (typeof content === "string") return textBlock(content);
  return h("div", {}, content.map((part) => (part.picture ? pictureOf(part.picture, file)
    : textBlock(part.type === "text" ? part.text : `[${part.type}] ${shorten(asText(part), 300)}`))));
}

/** Show the thumbnail of an image or video, its tokens, size and file. */
function pictureOf(picture, file) {
  const { width, height, frames, path, source } = picture, kind = shorten(picture.kind, 40);
  const title = picture.num_tokens ? `[${kind}: ${num(picture.num_tokens)} tokens]` : `[${kind}]`;
  const about = [typeof width === "number" ? `${num(width)} x ${num(height)}` : null, frames ? `${num(frames)} frames` : null,
    path, source ? `read from ${source}` : null, picture.has_files ? null : picture.text || "the file is missing"];
  const note = h("figcaption", {}, title, h("span", { class: "dim" }, shorten(about.filter(Boolean).join(", "), 400)));
  if (!picture.has_files) return h("figure", { class: "picture" }, note);
  const scale = Math.min(1, MAX_THUMBNAIL / Math.max(width, height));
  const small = h("img", { src: pictureAddress(file, picture.thumbnail), alt: `${kind} ${path}`, loading: "lazy",
    width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) });
  return h("figure", { class: "picture" }, note, EXPORT ? small
    : h("a", { href: pictureAddress(file, path), target: "_blank", rel: "noopener", title: "The whole picture" }, small));
}

const pictureAddress = (file, name) => (EXPORT ? `pictures/${runNumber()}/${name.split("/").pop()}`
  : `picture?${queryOf({ run: runNumber(), file, name })}`);

function callBlock(call) {
  const isMade = call.num_attempts > 0 || call.is_cached;
  const about = [
    ...(isMade ? [`${seconds(call.queue_seconds)} in the queue`, `${seconds(call.seconds)} at work`] : []),
    call.num_attempts > 1 ? `${call.num_attempts} attempts` : null, call.is_cached ? "from the cache" : null,
    `result ${num(call.num_tokens)} token${call.num_tokens === 1 ? "" : "s"}${call.num_cut_tokens ? ` (${num(call.num_cut_tokens)} cut)` : ""}`];
  return h("div", { class: "call" }, h("div", {}, h("b", {}, call.name), " ",
    h("span", { class: outcomeClass(call.outcome) }, call.outcome), h("span", { class: "dim" }, `  ${about.filter(Boolean).join(", ")}`)),
  isMade || Object.keys(call.arguments || {}).length ? textBlock(asText(call.arguments)) : null, call.message ? h("div", { class: "bad" }, textBlock(call.message)) : null);
}

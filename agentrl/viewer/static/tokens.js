/* The tokens of a trajectory, on its page. */
"use strict";

const PAGE_TOKENS = 500;
const MAX_TOKEN = 80;

const MEASURES = {
  mask: ["Mask", null], rollout_log_probs: ["Log-prob. at sampling", "low"], old_log_probs: ["Log-prob. at training", "low"],
  ratio: ["Ratio", "one"], entropies: ["Entropy", "high"], advantages: ["Advantage", "sign"],
  token_level_rewards: ["Reward", "sign"], token_level_scores: ["Score", "sign"], ref_log_prob: ["Log-prob. of the reference", "low"],
  values: ["Value", "sign"], returns: ["Return", "sign"], response_mask: ["Trained", null], rollout_is_weights: ["Weight of the correction", "one"],
  version: ["Weights", "range"], id: ["Id", null],
};

/** Show the tokens of a sequence: its response, and its prompt when it is opened. */
async function fillTokens(section, parameters, one, sequence = one.sequences.length - 1) {
  const detail = h("div", { class: "detail", id: "token-detail" }, h("span", { class: "dim" }, "Point at a token, or choose one with a click and move with ← and →."));
  const response = tokenPages({ ...parameters, sequence }, detail, "Index");
  const prompt = tokenPages({ ...parameters, sequence, part: "prompt" }, detail, "Index in the prompt");
  const tokens = await response.load(0), measures = measuresOf(tokens.columns);
  if (!measures.includes(tokenView.color)) tokenView.color = "mask";
  const paint = () => { response.paint(); prompt.paint(); };
  paint();
  const color = h("select", { id: "color", onchange: (e) => { tokenView.color = e.target.value; paint(); } },
    measures.filter((name) => name !== "id").map((name) => h("option", { value: name, selected: name === tokenView.color }, MEASURES[name][0])));
  const notes = [tokens.columns.text ? null : "The tokenizer of the run's model is not on this machine: tokens are shown as ids.",
    tokens.note ? `Values of training are missing: ${tokens.note}.` : null];
  const number = one.sequences[sequence].num_prompt_tokens;
  const open = (e) => { if (e.target.open && !prompt.isLoaded()) prompt.load(0); };
  section.replaceChildren(h("h2", {}, "Tokens"), h("div", { class: "bar" }, h("label", {}, "Color ", color),
    one.sequences.length > 1 ? h("label", {}, "Sequence ", h("select", { id: "sequence", onchange: (e) => fillTokens(section, parameters, one, Number(e.target.value)) },
      one.sequences.map((_, i) => h("option", { value: i, selected: i === sequence }, i + 1)))) : null,
    h("span", { class: "dim" }, "Gray text was observed, not sampled.")),
  ...notes.filter(Boolean).map((note) => h("p", { class: "dim" }, note)), detail,
  h("details", { id: "prompt-tokens", ontoggle: open }, h("summary", {}, `Prompt (${num(number)} token${number === 1 ? "" : "s"})`), prompt.content),
  h("div", { id: "response-tokens" }, response.content));
}

const measuresOf = (columns) => Object.keys(MEASURES).filter((name) => columns[name]);

/** Make the pages of the prompt or of the response; `load` shows the page that begins at a token. */
function tokenPages(query, detail, indexName) {
  const flow = h("div", { class: "tokens", tabindex: "0", "aria-label": query.part === "prompt" ? "Prompt tokens" : "Response tokens" });
  const pager = h("div", { class: "bar" });
  let tokens = null, spans = [], chosen = -1;
  const paint = () => spans.forEach((span, i) => { span.style.background = colorOf(tokens.columns, tokenView.color, i); });
  const load = async (start) => {
    tokens = await get("tokens", { ...query, start });
    spans = spansOf(tokens);
    chosen = -1;
    const turnAt = new Map(tokens.turns.map((turn) => [turn.start - start, turn]));
    flow.replaceChildren(...spans.flatMap((span, i) => (turnAt.has(i)
      ? [h("span", { class: "turn-mark" }, `${i ? "\n" : ""}${turnAt.get(i).role}`), span] : [span])));
    const end = Math.min(start + PAGE_TOKENS, tokens.num);
    pager.replaceChildren(h("span", { class: "dim" }, query.part === "prompt" ? "" : "Response"),
      h("button", { disabled: start === 0, "aria-label": "Tokens before", onclick: () => load(start - PAGE_TOKENS) }, "←"),
      h("span", { class: "dim" }, tokens.num ? `${num(start)} to ${num(end - 1)} of ${num(tokens.num)}` : "no tokens"),
      h("button", { disabled: end >= tokens.num, "aria-label": "Tokens after", onclick: () => load(start + PAGE_TOKENS) }, "→"));
    paint();
    return tokens;
  };
  const explain = (i) => detail.replaceChildren(h("span", {}, h("b", {}, indexName), num(tokens.start + i)),
    ...(tokens.columns.text ? [h("span", {}, h("b", {}, "Text"), shorten(JSON.stringify(tokens.columns.text[i]), 60))] : []),
    ...measuresOf(tokens.columns).map((name) => h("span", {}, h("b", {}, MEASURES[name][0]), num(tokens.columns[name][i]))),
    query.part === "prompt" ? h("span", { class: "dim" }, "observed: not trained, no log-probability") : "");
  const choose = (i) => {
    if (i < 0 || i >= spans.length) return;
    if (spans[chosen]) spans[chosen].classList.remove("chosen");
    chosen = i;
    spans[i].classList.add("chosen");
    explain(i);
  };
  flow.addEventListener("pointerover", (e) => { if (e.target.dataset.at) explain(Number(e.target.dataset.at)); });
  flow.addEventListener("click", (e) => { if (e.target.dataset.at) choose(Number(e.target.dataset.at)); });
  flow.addEventListener("keydown", (e) => {
    if (e.key !== "ArrowRight" && e.key !== "ArrowLeft") return;
    const by = e.key === "ArrowRight" ? 1 : -1;
    let next = chosen + by;
    while (spans[next] && spans[next].hidden) next += by;
    choose(next);
    e.preventDefault();
    e.stopPropagation();
  });
  return { content: [pager, flow], load, paint, isLoaded: () => tokens !== null };
}

/** Make an element for each token; the tokens of an image or video are one. */
function spansOf({ columns, start, media }) {
  return columns.id.map((id, i) => {
    const span = media.find((one) => one.start <= start + i && start + i < one.end);
    const text = columns.text ? shorten(columns.text[i], MAX_TOKEN) : `${id} `;
    const isFirst = span && (i === 0 || span.start === start + i);
    return h("span", { class: `token${columns.mask[i] ? "" : " observed"}`, "data-at": i, hidden: span && !isFirst },
      isFirst ? `[${span.kind}: ${num(span.end - span.start)} tokens]` : text);
  });
}

function colorOf(columns, name, i) {
  if (!columns[name]) return "transparent";
  const value = columns[name][i];
  const tint = (sign, share) => `color-mix(in srgb, var(--${sign}) ${Math.round(65 * Math.min(1, share))}%, transparent)`;
  if (name === "mask" || name === "response_mask") return value ? tint("pos", 0.4) : "transparent";
  if (typeof value !== "number" || !columns.mask[i]) return "transparent";
  switch (MEASURES[name][1]) {
    case "low": return tint("neg", -value / 4);
    case "high": return tint("neg", value / 3);
    case "range": {
      const all = columns[name].filter((one) => typeof one === "number"), low = Math.min(...all);
      return tint("pos", (value - low + 1) / (Math.max(...all) - low + 1));
    }
    case "one": return value >= 1 ? tint("pos", Math.log(Math.max(value, 1)) * 2) : tint("neg", -Math.log(Math.max(value, 1e-9)) * 2);
    default: return tint(value >= 0 ? "pos" : "neg", Math.abs(value));
  }
}

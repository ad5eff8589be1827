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

async function fillTokens(section, parameters, one, sequence = one.sequences.length - 1, start = 0) {
  const tokens = await get("tokens", { ...parameters, sequence, start });
  const { columns } = tokens;
  const known = Object.keys(MEASURES).filter((name) => columns[name]);
  if (!columns[tokenView.color]) tokenView.color = "mask";
  const detail = h("div", { class: "detail", id: "token-detail" }, h("span", { class: "dim" }, "Point at a token, or choose one with a click and move with ← and →."));
  const flow = h("div", { class: "tokens", tabindex: "0", "aria-label": "Tokens" });
  const spans = columns.id.map((id, i) => {
    const media = tokens.media.find((span) => span.start <= start + i && start + i < span.end);
    const text = columns.text ? shorten(columns.text[i], MAX_TOKEN) : `${id} `;
    const isFirst = media && (i === 0 || media.start === start + i);
    return h("span", { class: `token${columns.mask[i] ? "" : " observed"}`, "data-at": i, hidden: media && !isFirst },
      isFirst ? `[${media.kind}: ${num(media.end - media.start)} tokens]` : text);
  });
  const paint = () => spans.forEach((span, i) => { span.style.background = colorOf(columns, tokenView.color, i); });
  const turnAt = new Map(tokens.turns.map((turn, i) => [turn.start - start, [turn, i]]));
  spans.forEach((span, i) => {
    if (turnAt.has(i)) flow.append(h("span", { class: "turn-mark" }, `${i ? "\n" : ""}${turnAt.get(i)[0].role}`));
    flow.append(span);
  });
  let chosen = -1;
  const explain = (i) => detail.replaceChildren(h("span", {}, h("b", {}, "Index"), num(start + i)),
    ...(columns.text ? [h("span", {}, h("b", {}, "Text"), shorten(JSON.stringify(columns.text[i]), 60))] : []),
    ...known.map((name) => h("span", {}, h("b", {}, MEASURES[name][0]), num(columns[name][i]))));
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
    if (e.key === "ArrowRight" || e.key === "ArrowLeft") { choose(chosen + (e.key === "ArrowRight" ? 1 : -1)); e.preventDefault(); e.stopPropagation(); }
  });
  const again = (seq, at) => fillTokens(section, parameters, one, seq, at);
  const color = h("select", { id: "color", onchange: (e) => { tokenView.color = e.target.value; paint(); } },
    known.filter((name) => name !== "id").map((name) => h("option", { value: name, selected: name === tokenView.color }, MEASURES[name][0])));
  paint();
  const notes = [columns.text ? null : "The tokenizer of the run's model is not on this machine: tokens are shown as ids.",
    tokens.note ? `Values of training are missing: ${tokens.note}.` : null];
  const end = Math.min(start + PAGE_TOKENS, tokens.num);
  section.replaceChildren(h("h2", {}, "Response tokens"), h("div", { class: "bar" }, h("label", {}, "Color ", color),
    one.sequences.length > 1 ? h("label", {}, "Sequence ", h("select", { onchange: (e) => again(Number(e.target.value), 0) },
      one.sequences.map((_, i) => h("option", { value: i, selected: i === sequence }, i + 1)))) : null,
    h("button", { disabled: start === 0, onclick: () => again(sequence, start - PAGE_TOKENS) }, "←"),
    h("span", { class: "dim" }, tokens.num ? `${num(start)} to ${num(end - 1)} of ${num(tokens.num)}` : "no tokens"),
    h("button", { disabled: end >= tokens.num, onclick: () => again(sequence, start + PAGE_TOKENS) }, "→"),
    h("span", { class: "dim" }, "Gray text was observed, not sampled.")),
  ...notes.filter(Boolean).map((note) => h("p", { class: "dim" }, note)), detail, flow);
}

function colorOf(columns, name, i) {
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

// ---- Python as people read it, and tokens by what is known of each

const PYTHON = /(#[^\n]*)|((?:\b[rbfuRBFU]{1,2})?(?:"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))|(\b\d[\w.]*)|(\b(?:and|as|assert|async|await|break|class|continue|def|del|elif|else|except|False|finally|for|from|global|if|import|in|is|lambda|None|nonlocal|not|or|pass|raise|return|True|try|while|with|yield)\b)|(\b[A-Za-z_]\w*(?=\())/g;
const KINDS = ["comment", "string", "number", "keyword", "called"];

function python(text) {
  const made = document.createDocumentFragment();
  let position = 0;
  for (const match of text.matchAll(PYTHON)) {
    if (match.index > position) made.append(text.slice(position, match.index));
    made.append(node("span", { class: KINDS[match.slice(1).findIndex(part => part !== undefined)] }, match[0]));
    position = match.index + match[0].length;
  }
  made.append(text.slice(position));
  return made;
}

const TOKEN_FIRST = 93, TOKEN_SCALE = 64, TOKEN_MOST = 320, DECADES = 16, LEAST_DECADE = 8, NEGATIVE = 160;

// A figure of the learner's by its letter; null where it did not train on the token.
const small = letter => letter < TOKEN_FIRST + TOKEN_MOST ? letter - TOKEN_FIRST : null;
const entropyOf = number => number === null ? null : (number / TOKEN_SCALE) ** 2;
const differenceOf = number => number === null ? null : number === 0 ? 0 : (number > NEGATIVE ? -1 : 1) * 10 ** ((number > NEGATIVE ? number - NEGATIVE : number) / DECADES - LEAST_DECADE);

// Tokens of a completion: where each lies in the text, its log-prob, the weights that sampled it, what the learner saw.
function tokensOf(turn, figures) {
  const [chars, logprobs, entropies, differences] = figures, tokens = [];
  const points = /[\ud800-\udfff]/.test(turn.completion) ? Array.from(turn.completion) : null; // counts are of code points
  let at = 0, run = 0, left = turn.versions.length ? turn.versions[0][1] : Infinity, place = 0;
  for (let i = 0; i < chars.length; i++) {
    const count = chars.charCodeAt(i) - TOKEN_FIRST;
    const length = points ? points.slice(at, at + count).join("").length : count;
    while (left === 0 && run + 1 < turn.versions.length) left = turn.versions[++run][1];
    const number = logprobs.charCodeAt(i) - TOKEN_FIRST;
    tokens.push({ start: place, end: place + length, logprob: -((number / TOKEN_SCALE) ** 2), least: number >= TOKEN_MOST, version: turn.versions.length ? turn.versions[run][0] : null,
      entropy: entropyOf(small(entropies.charCodeAt(i))), difference: differenceOf(small(differences.charCodeAt(i))) });
    at += count;
    place += length;
    left--;
  }
  return tokens;
}

// One colour for each way of looking; `amount` in 0..1 is how strong it is (`legend` tells the reader), `of` the figure that not all records have.
const LOOKS = {
  logprob: { title: "log-prob", legend: "stronger: less likely; strongest from -5 nats", amount: token => Math.min(1, Math.sqrt(-token.logprob / 5)), hue: () => "var(--tone-doubt)", tell: token => `${token.least ? "below " : ""}${token.logprob.toFixed(token.logprob > -0.1 ? 4 : 2)} nats, probability ${(100 * Math.exp(token.logprob)).toPrecision(3)} %` },
  surprise: { title: "only unlikely ones", legend: "coloured: log-prob below -1 nat", amount: token => token.logprob < -1 ? 0.9 : 0, hue: () => "var(--tone-doubt)", tell: token => `probability ${(100 * Math.exp(token.logprob)).toPrecision(3)} %` },
  entropy: { title: "entropy", legend: "stronger: higher; strongest from 3 nats", of: 2, amount: token => token.entropy === null ? 0 : Math.min(1, Math.sqrt(token.entropy / 3)), hue: () => "var(--purple)", tell: token => token.entropy === null ? "not trained on" : `entropy ${token.entropy.toPrecision(2)} nats where it was drawn` },
  difference: { title: "learner − engine", legend: "blue: the learner's log-prob is higher, amber: the engine's; strongest from 0.1 nats", of: 3, amount: token => token.difference ? Math.min(1, Math.max(0.04, (Math.log10(Math.abs(token.difference)) + 6) / 5)) : 0, hue: token => token.difference > 0 ? "var(--blue)" : "var(--amber)", tell: token => token.difference === null ? "not trained on" : `the learner's log-prob less the engine's: ${token.difference.toExponential(0)} nats` },
  advantage: { title: "advantage", legend: "green: positive, red: negative; strongest from 2.2", amount: (token, row) => row.advantage === null ? 0 : Math.min(1, 0.12 + Math.abs(row.advantage) / 2.5), hue: (token, row) => row.advantage > 0 ? "var(--tone-good)" : "var(--tone-bad)", tell: (token, row) => row.advantage === null ? "not trained on" : `advantage ${row.advantage}, the same for every token of a trajectory` },
  version: { title: "policy version", legend: "one colour for each version", amount: () => 0.5, hue: token => `hsl(${(token.version * 67) % 360} 60% 50%)`, tell: token => `sampled by version ${token.version}` },
};

// The text of [start, end) with its tokens coloured.
function coloured(text, start, end, tokens, look, row) {
  const made = document.createDocumentFragment();
  let position = start;
  for (const token of tokens) {
    const from = Math.max(token.start, start), to = Math.min(token.end, end);
    if (to <= from) continue;
    if (from > position) made.append(text.slice(position, from));
    const amount = look.amount(token, row);
    made.append(node("span", { class: "tok", title: look.tell(token, row), style: amount > 0.02 ? `--hue:${look.hue(token, row)};--amount:${Math.round(70 * amount)}%` : null }, text.slice(from, to)));
    position = to;
  }
  if (position < end) made.append(text.slice(position, end));
  return made;
}

// The page of the schedule explorer: the form, the address, the picture, the tables.  What is computed is in schedules.js.
const WITHIN = 0.05; // how far, as a share, the cost of an arm may be from that of the schedule
const { explore } = scheduleMath(CONSTANTS);
const element = (id) => document.getElementById(id);
const fields = [...element("settings").elements];
const valueOf = (id) => (element(id).type === "checkbox" ? String(element(id).checked) : element(id).value);
const initial = Object.fromEntries(fields.map((field) => [field.id, valueOf(field.id)]));
let shown = null; // the last schedule that could be made

// --- the form and the address ----------------------------------------------------------------------

// Turn off what has no meaning for a family, and show how a named schedule is turned.
function enable() {
  const named = CONSTANTS.suite[valueOf("family")];
  const fixed = valueOf("family") === "STATIC";
  if (named) [element("triangular").checked, element("mirror").value] = [named.triangular, named.mirror];
  for (const id of ["q_min", "n_cycles", "delay", "budget"]) element(id).disabled = fixed;
  element("triangular").disabled = fixed || Boolean(named);
  element("mirror").disabled = element("triangular").disabled || !element("triangular").checked;
  element("delay_at").disabled = fixed || valueOf("budget") !== "" || Number(valueOf("delay")) === 0;
}

function settings() {
  const number = (id) => (valueOf(id).trim() === "" ? NaN : Number(valueOf(id)));
  const fixed = valueOf("family") === "STATIC";
  const budget = element("budget");
  const none = fixed || (budget.value === "" && !budget.validity.badInput);
  return {
    family: valueOf("family"),
    triangular: element("triangular").checked,
    mirror: valueOf("mirror"),
    q_min: number("q_min"),
    q_max: number("q_max"),
    n_cycles: number("n_cycles"),
    total_steps: number("total_steps"),
    delay: fixed ? 0 : number("delay"),
    delay_at: element("delay_at").disabled ? "q_max" : valueOf("delay_at"),
    budget: none ? null : number("budget"),
  };
}

// Fill in the form from the address; return a sentence about what does not fit.
function fromAddress() {
  const wanted = { ...initial, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
  const problems = [];
  for (const field of fields) {
    const value = wanted[field.id];
    if (field.type === "checkbox") field.checked = value === "true";
    else field.value = value;
    if (field.tagName === "SELECT" && field.value !== value) {
      problems.push(`The address asks for ${field.id} "${value}", which does not exist.`);
      field.value = initial[field.id];
    } else if (field.type === "number" && field.value !== value) {
      problems.push(`The address gives ${field.id} "${value}", which is not a number.`);
      field.value = initial[field.id];
    }
  }
  return problems.join(" ");
}

// What has a meaning for this family stands in the address.
function toAddress() {
  const kept = fields.filter((field) => !field.disabled && valueOf(field.id) !== "");
  const hash = new URLSearchParams(kept.map((field) => [field.id, valueOf(field.id)])).toString();
  if (hash !== location.hash.slice(1)) history.replaceState(null, "", `#${hash}`);
}

// --- the picture ------------------------------------------------------------------------------------

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Runs of equal bits: [[first step, bits], ...].
function runsOf(bits) {
  const runs = [];
  bits.forEach((q, t) => {
    if (t === 0 || q !== bits[t - 1]) runs.push([t, q]);
  });
  return runs;
}

// The least of 1, 2, 5, 10, 20, ... that is not below x: a distance of ticks, always whole.
function tickStep(x) {
  const ten = Math.pow(10, Math.floor(Math.log10(Math.max(x, 1))));
  return [1, 2, 5, 10].map((k) => k * ten).find((step) => step >= x);
}

function draw({ bits, hold, held, s }) {
  const width = Math.max(280, element("picture").clientWidth);
  const height = width < 500 ? 240 : 300;
  const edge = { left: 52, right: 14, top: 12, bottom: 44 };
  const low = s.family === "STATIC" ? Math.max(1, s.q_max - 2) : Math.min(s.q_min, s.q_max - 1);
  const apart = held > s.q_max; // float32 stands above a gap, not to scale
  const high = s.q_max + (apart ? 1.8 : 0.4);
  const x = (t) => edge.left + ((width - edge.left - edge.right) * t) / bits.length;
  const level = (q) => (apart && q === held ? s.q_max + 1.3 : q);
  const y = (q) => edge.top + ((height - edge.top - edge.bottom) * (high - level(q))) / (high - low + 0.4);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spoken(shown) });
  const add = (...args) => picture.append(svg(...args));
  if (hold) {
    const box = { class: "hold", x: x(0), y: edge.top, width: x(hold) - x(0), height: height - edge.top - edge.bottom };
    add("rect", box);
  }
  const every = tickStep((s.q_max - low) / 8);
  const ticks = [];
  for (let q = s.q_max; q >= Math.max(low, 1); q -= every) ticks.push([q, q]);
  if (apart) ticks.push([held, "float32"]);
  for (const [q, label] of ticks) {
    add("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: y(q), y2: y(q) });
    add("text", { x: edge.left - 6, y: y(q) + 4, "text-anchor": "end" }, label);
  }
  const bottom = height - edge.bottom;
  add("line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: bottom, y2: bottom });
  const step = tickStep(bits.length / (width < 500 ? 3 : 7));
  for (let t = 0; t <= bits.length; t += step) {
    add("line", { class: "axis", x1: x(t), x2: x(t), y1: bottom, y2: bottom + 5 });
    const label = t.toLocaleString("en");
    const end = x(t) + 4 * label.length > width;
    add("text", { x: end ? width - 2 : x(t), y: bottom + 20, "text-anchor": end ? "end" : "middle" }, label);
  }
  add("text", { transform: `translate(14 ${(edge.top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, "bits");
  const runs = runsOf(bits);
  const fine = runs.length > width; // then a pixel holds more than a line can show: draw its lowest to its highest bits
  const time = `optimizer step${fine ? " (too many cycles to tell apart)" : ""}`;
  add("text", { x: (edge.left + width) / 2, y: height - 6, "text-anchor": "middle" }, time);
  const d = fine ? columns(bits, x, y) : steps(runs, bits.length, x, y);
  add("path", { class: "bits", d, "stroke-width": fine ? 1 : 2 });
  element("picture").replaceChildren(picture);
}

function steps(runs, total, x, y) {
  const part = ([start, q], i) => {
    const end = i + 1 < runs.length ? runs[i + 1][0] : total;
    return `${i ? "L" : "M"}${x(start).toFixed(1)} ${y(q).toFixed(1)}H${x(end).toFixed(1)}`;
  };
  return runs.map(part).join("");
}

function columns(bits, x, y) {
  const found = new Map();
  bits.forEach((q, t) => {
    const column = Math.floor(x(t));
    const [least, most] = found.get(column) ?? [q, q];
    found.set(column, [Math.min(least, q), Math.max(most, q)]);
  });
  return [...found].map(([column, [a, b]]) => `M${column + 0.5} ${y(a) + 0.5}V${y(b) - 0.5}`).join("");
}

// --- numbers and results ----------------------------------------------------------------------------

const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.001 ? 3 : 1)} %`;
const bitsName = (q, made) => (made.held === q && q > made.s.q_max ? "float32" : String(q));

function spoken(made) {
  const { relative_cost: cost, noise_exposure: noise, savings, s } = made;
  const group = savings ? ` (${savings === "none" ? "no" : savings} savings)` : "";
  const steps = `${s.total_steps.toLocaleString("en")} steps`;
  return (
    `Relative cost ${cost.toFixed(4)}${group}, noise exposure ${Number(noise.toPrecision(4)).toLocaleString("en")}: ` +
    `${s.budget === null ? "" : "bent "}${s.family}, ${s.family === "STATIC" ? "" : `${s.q_min} to `}${s.q_max} bits, ${steps}.`
  );
}

// A line of a table; its first cell is its heading.
function lineOf(texts, className = "") {
  const row = document.createElement("tr");
  row.className = className;
  texts.forEach((text, i) => {
    const cell = document.createElement(i ? "td" : "th");
    if (!i) cell.scope = "row";
    cell.append(text);
    row.append(cell);
  });
  return row;
}

function showShares(made) {
  const rows = made.shares.map(({ bits, share }) => {
    const bar = document.createElement("span");
    bar.className = "bar";
    bar.style.width = `${100 * share}%`;
    return lineOf([bitsName(bits, made), percent(share), bar]);
  });
  document.querySelector("#shares tbody").replaceChildren(...rows.reverse());
}

function quality(arm, digits) {
  if (arm.mean === null) return "–";
  const lost = arm.diverged ? `, ${arm.diverged} diverged` : "";
  const interval = arm.low === null ? "" : ` [${arm.low.toFixed(digits)}, ${arm.high.toFixed(digits)}]`;
  return arm.mean.toFixed(digits) + interval + lost;
}

function tableOf(experiment, arms) {
  const table = document.createElement("table");
  table.createCaption().textContent = experiment.name;
  const head = table.createTHead().insertRow();
  for (const text of ["Arm", "Cost", `${experiment.metric}, mean [95\u00a0%]`, "n"]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = text;
    head.append(cell);
  }
  const top = `static ${experiment.q_max}`;
  const baseline = experiment.arms.filter((arm) => arm.arm === top && !arms.includes(arm));
  const row = (arm) => [arm.arm, arm.relative_cost.toFixed(3), quality(arm, experiment.digits), String(arm.n)];
  table.createTBody().append(
    ...arms.map((arm) => lineOf(row(arm))),
    ...baseline.map((arm) => lineOf(row(arm), "baseline")),
  );
  return table;
}

function showResults({ relative_cost: cost, s }) {
  const comparable = armsAtCost(EXPERIMENTS, cost, s.q_max, WITHIN);
  const found = comparable.filter(([, arms]) => arms.length);
  const all = [...new Set(EXPERIMENTS.map((experiment) => experiment.q_max))].join(", ");
  const small =
    "They are small runs, of seconds to minutes on a CPU, on the data that their titles name, each with its own length, cycles and " +
    "q_min: they tell what these tasks did at this cost, not what yours will. n counts seeds; where intervals " +
    "overlap, the order may be chance; fewer than three seeds have no interval. The shaded line is static q_max.";
  element("results-note").textContent = found.length
    ? `Arms whose relative cost is within ${100 * WITHIN} % of ${cost.toFixed(3)}. ${small}`
    : comparable.length
      ? `No arm of the committed runs costs within ${100 * WITHIN} % of ${cost.toFixed(3)}.`
      : `The committed runs have q_max = ${all}: costs relative to static ${s.q_max} bits cannot be compared with theirs.`;
  element("tables").replaceChildren(...found.map(([experiment, arms]) => tableOf(experiment, arms)));
}

// --- all of it ---------------------------------------------------------------------------------------

// Show the schedule of the form; where there is none, say why and leave the last one in place.
function show(sentence = "") {
  enable();
  const s = settings();
  let made;
  try {
    made = explore(s);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    const kept = shown ? " What is shown is the last schedule that could be made." : "";
    element("problem").textContent = error.message + kept;
    return false;
  }
  shown = { ...made, s };
  element("problem").textContent = [sentence, made.warning].filter(Boolean).join(" ");
  element("summary").textContent = spoken(shown);
  element("line").textContent = `import cpt_core as cpt\n\nschedule = ${made.line}`;
  element("copied").textContent = "";
  draw(shown);
  showShares(shown);
  showResults(shown);
  return true;
}

function openAddress() {
  const sentence = fromAddress();
  if (!show(sentence) && !shown) {
    const problem = element("problem").textContent;
    element("settings").reset();
    show(`${problem} This is the schedule that the page opens with.`);
  }
}

async function copy() {
  try {
    await navigator.clipboard.writeText(element("line").textContent);
    element("copied").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(element("line")); // no clipboard here: the keys will do it
    element("copied").textContent = "Selected: press Ctrl+C.";
  }
}

let waiting;
element("settings").addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => show() && toAddress(), 150);
});
element("settings").addEventListener("submit", (event) => event.preventDefault());
element("copy").addEventListener("click", copy);
addEventListener("hashchange", openAddress);
new ResizeObserver(() => shown && draw(shown)).observe(element("picture"));
openAddress();

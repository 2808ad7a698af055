// The page: the form, the address, the trainings in a worker, the pictures and the verdict.
// What is computed is in schedules.js and, in the worker, in training.js.
const EVERY = 16; // steps between two points of the curves
const { explore } = scheduleMath(CONSTANTS);
const STEPS = CONSTANTS.steps;
const element = (id) => document.getElementById(id);
const fields = [...element("settings").elements].filter((field) => field.name);
const KINDS = ["chosen", "rival"];
const NUMBERS = ["q_min", "q_max", "q_grad", "n_cycles", "rate", "seeds"];
let shown = null; // both arms of the settings
let found = []; // what the worker said of them
let worker = null;

// --- the form and the address ----------------------------------------------------------------------

function settings() {
  const values = Object.fromEntries(fields.map((field) => [field.name, field.value]));
  for (const name of NUMBERS) values[name] = Number(values[name]);
  return values;
}

function labelForm(s) {
  const fixed = s.family === "STATIC";
  for (const field of fields.filter((f) => f.type === "range")) element(`${field.id}-value`).textContent = field.value;
  element("q_min-name").textContent = fixed ? "Bits" : "Lowest bits, q_min";
  element("n_cycles").disabled = fixed;
}

function fromAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const field of fields) {
    const before = field.value;
    if (wanted.has(field.name)) field.value = wanted.get(field.name);
    if (field.value !== (wanted.get(field.name) ?? before)) field.value = before; // a choice that does not exist
  }
}

function changed() {
  stop();
  found = [];
  const s = settings();
  labelForm(s);
  const fresh = `#${new URLSearchParams(fields.map((field) => [field.name, field.value]))}`;
  if (fresh !== location.hash) history.replaceState(null, "", fresh);
  try {
    shown = { ...explore(s), s };
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    shown = null;
    element("problem").textContent = error.message;
  }
  element("train").disabled = element("results").hidden = !shown;
  if (!shown) return;
  element("problem").textContent = shown.warning;
  element("python").textContent =
    `import cpt_core as cpt\nfrom cpt_extras.search.allocation import static_of_cost\n\n${shown.python}`;
  showAll();
}

// --- training ---------------------------------------------------------------------------------------

function pictures() {
  const images = Float32Array.from(DIGITS.images, (letter) => (letter.charCodeAt(0) - 65) / 16);
  return { images, labels: Array.from(DIGITS.labels, Number) };
}

function stop() {
  worker?.terminate();
  worker = null;
  element("train").textContent = "Train";
}

function start() {
  found = [];
  const code = `${element("training").textContent}
    onmessage = ({ data }) => { for (const part of train(data)) postMessage(part); };`;
  const address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  worker = new Worker(address);
  worker.onmessage = ({ data }) => {
    found.push(data);
    if (data.step === STEPS) stop();
    else element("train").textContent = `Stop, at step ${data.step} of ${STEPS}`;
    requestAnimationFrame(showAll);
  };
  worker.onerror = (event) => {
    stop();
    element("verdict").textContent = `The training stopped: ${event.message}`;
  };
  const arms = [shown.chosen, shown.rival].map(({ bits, q_grad, evaluated }) => ({ bits, q_grad, evaluated }));
  const { steps, batch, learn } = CONSTANTS;
  const { seeds, rate } = shown.s;
  worker.postMessage({ arms, seeds, rate, steps, batch, learn, every: EVERY, ...pictures() });
  element("train").textContent = "Stop";
  showAll();
  if (matchMedia("(max-width: 56rem)").matches) element("results").scrollIntoView(); // there it is below the form
}

// --- numbers ----------------------------------------------------------------------------------------

const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;
const signed = (x) => `${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(2)}`;
const differences = ({ accuracy }) => accuracy[0].map((a, seed) => 100 * (a - accuracy[1][seed]));

// Half of the 95 % interval of a mean over seeds (Student's t).
function half(values) {
  const middle = mean(values);
  const squares = values.reduce((sum, x) => sum + (x - middle) ** 2, 0);
  return CONSTANTS.student[values.length] * Math.sqrt(squares / (values.length - 1) / values.length);
}

function verdict() {
  const { chosen, rival, same, s } = shown;
  const cost = chosen.relative_cost.toFixed(4);
  if (same) return `At a cost of ${cost}, ${chosen.name} is its own static rival: there is nothing to compare. ${s.family === "STATIC" ? "Choose a schedule" : "Raise q_max"}.`;
  const last = found.at(-1);
  if (worker) return `Training 2 × ${s.seeds} networks.`;
  if (last?.step !== STEPS) return `${chosen.name} against ${rival.name}, at a cost of ${cost}: press Train.`;
  const lost = last.loss.flat().filter((loss) => !Number.isFinite(loss)).length;
  if (lost) return `Nothing to say: ${lost} of ${2 * s.seeds} trainings diverged. Choose a smaller learning rate.`;
  const apart = differences(last);
  const [middle, spread] = [mean(apart), half(apart)];
  const told = `${signed(middle)} ± ${spread.toFixed(2)} points of test accuracy (mean over ${s.seeds} seeds, 95 % interval)`;
  const between = `${chosen.name} minus ${rival.name}, at the same cost, is ${told}`;
  if (Math.abs(middle) <= spread) return `Too uncertain to say which is better: ${between}.`;
  return `${middle > 0 ? chosen.name : "The static rival"} was better here: ${between}.`;
}

function row(name, texts, kind) {
  const line = document.createElement("tr");
  const head = document.createElement("th");
  head.scope = "row";
  if (kind) head.append(block("swatch", kind));
  head.append(name);
  line.append(head);
  for (const text of texts) line.insertCell().append(text);
  return line;
}

function block(...classes) {
  const made = document.createElement("span");
  made.classList.add(...classes);
  return made;
}

// What is spent, as a part of what static q_max spends, product by product.
function bar({ spent, relative_cost }) {
  const box = block("bar");
  for (const [kind, share] of Object.entries(spent)) {
    const part = block(kind);
    part.style.width = `${(100 * share) / Math.max(1, relative_cost)}%`;
    box.append(part);
  }
  return box;
}

function showNumbers() {
  const arms = [shown.chosen, shown.rival];
  KINDS.forEach((kind, a) => {
    element(`${kind}-name`).textContent = `${arms[a].name}, cost ${arms[a].relative_cost.toFixed(4)}`;
  });
  const last = found.at(-1);
  const measured = (name, digits, factor = 1) =>
    arms.map((_, a) => {
      if (!last) return "–";
      const values = last[name][a].map((x) => factor * x);
      return last.loss[a].every(Number.isFinite) ? `${mean(values).toFixed(digits)} ± ${half(values).toFixed(digits)}` : "diverged";
    });
  const part = (kind) => arms.map((arm) => `${((100 * arm.spent[kind]) / arm.relative_cost).toFixed(1)} %`);
  element("numbers").replaceChildren(
    row("Cost", arms.map((arm) => arm.relative_cost.toFixed(4))),
    row("Spent of 1", arms.map(bar)),
    row("forward", part("forward"), "forward"),
    row("error", part("error"), "error"),
    row("weight gradient", part("weight"), "weight"),
    row("Training loss", measured("loss", 3)),
    row("Test accuracy (%)", measured("accuracy", 2, 100)),
  );
  element("verdict").textContent = verdict();
  element("reference").textContent = `static ${shown.s.q_max} with gradients of ${shown.s.q_max} bits`;
}

// --- pictures ---------------------------------------------------------------------------------------

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// lines: [class, [[step, value], ...]], cut off below and above; staircase: values hold until the next.
function chart(id, { low, high, ticks, unit = "", lines, staircase = false, zero = null }) {
  const box = element(id);
  const [width, height] = [Math.max(240, box.clientWidth), 190];
  const edge = { left: 44, right: 10, top: 8, bottom: 26 };
  const x = (t) => edge.left + ((width - edge.left - edge.right) * t) / STEPS;
  const y = (v) => edge.top + ((height - edge.top - edge.bottom) * (high - v)) / (high - low);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": `${id}-title` });
  for (const tick of ticks) {
    picture.append(svg("line", { class: tick === zero ? "axis" : "grid", x1: edge.left, x2: width - edge.right, y1: y(tick), y2: y(tick) }));
    picture.append(svg("text", { x: edge.left - 6, y: y(tick) + 4, "text-anchor": "end" }, `${tick}${unit}`.replace("-", "−")));
  }
  for (let t = 0; t <= STEPS; t += STEPS / 4) {
    const label = t === STEPS ? `${t} steps` : t;
    picture.append(svg("text", { x: x(t), y: height - 6, "text-anchor": t === STEPS ? "end" : "middle" }, label));
  }
  const inner = { x: edge.left, y: edge.top - 2, width: width - edge.left - edge.right, height: height - edge.top - edge.bottom + 4 };
  const within = svg("svg", { ...inner, viewBox: Object.values(inner).join(" ") });
  for (const [kind, points] of lines) {
    const d = points.map(([t, v], i) => {
      if (!Number.isFinite(v)) return "";
      const [across, up] = [x(t).toFixed(1), y(v).toFixed(1)];
      if (i === 0 || !Number.isFinite(points[i - 1][1])) return `M${across} ${up}`;
      return staircase ? `H${across}V${up}` : `L${across} ${up}`;
    });
    within.append(svg("path", { class: kind, d: d.join("") }));
  }
  picture.append(within);
  box.replaceChildren(picture);
}

// Of one quantity the line of every seed, thin, and their means, of both arms.
function curves(name, factor = 1) {
  const points = (a, value) => found.map((part) => [part.step, factor * value(part[name][a])]);
  const thin = KINDS.flatMap((kind, a) =>
    Array.from({ length: shown.s.seeds }, (_, seed) => [`thin ${kind}`, points(a, (values) => values[seed])]),
  );
  return [...thin, ...KINDS.map((kind, a) => [kind, points(a, mean)])];
}

const range = (low, high, by) => Array.from({ length: Math.floor((high - low) / by + 1e-9) + 1 }, (_, i) => low + i * by);

function showPictures() {
  const arms = [shown.chosen, shown.rival];
  const { s } = shown;
  const step = found.at(-1)?.step ?? (worker ? 0 : STEPS);
  const top = Math.max(s.q_max, s.q_min + 1);
  const both = (more, values) => arms.map((arm, a) => [`${KINDS[a]} ${more}`, values(arm)]).reverse();
  const stairs = both("plan", (arm) => [...Array.from(arm.bits, (q, t) => [t, q]), [STEPS, arm.bits[STEPS - 1]]]);
  const now = step === STEPS ? [] : [["now", [[step, 0], [step, 99]]]];
  const ticks = range(s.q_min, top, top - s.q_min > 6 ? 2 : 1);
  chart("bits", { low: s.q_min - 0.3, high: top + 0.3, ticks, lines: [...stairs, ...now], staircase: true });
  const most = Math.max(1, shown.chosen.relative_cost);
  const spent = both("", (arm) => [[0, 0], ...arm.soFar.slice(0, step).map((sum, t) => [t + 1, sum])]);
  chart("cost", { low: 0, high: most, ticks: range(0, most, most > 2 ? Math.ceil(most / 5) : 0.25), lines: spent });
  chart("loss", { low: 0, high: 2.5, ticks: [0, 0.5, 1, 1.5, 2, 2.5], lines: curves("loss") });
  const poor = !found.length || Math.min(...found.at(-1).accuracy.flat()) < 0.6;
  const lowest = poor ? 0 : 60;
  chart("accuracy", { low: lowest, high: 100, ticks: range(lowest, 100, poor ? 25 : 10), unit: " %", lines: curves("accuracy", 100) });
  const apart = found.map(differences);
  const points = (value) => found.map((part, i) => [part.step, value(apart[i])]);
  const late = [...apart.slice(6).map(mean), ...apart.slice(-3).flat()].map(Math.abs).filter(Number.isFinite);
  const reach = [1, 2, 5, 10, 20, 50, 100].find((n) => n >= Math.max(0, ...late)) ?? 100;
  const seeds = apart.length ? apart[0].map((_, seed) => ["thin chosen", points((values) => values[seed])]) : [];
  const tick = reach / 2;
  const scale = { low: -reach, high: reach, ticks: range(-reach, reach, tick), zero: 0 };
  chart("difference", { ...scale, lines: [...seeds, ["chosen", points(mean)]] });
}

function showAll() {
  if (!shown) return;
  showNumbers();
  showPictures();
}

element("settings").addEventListener("input", changed);
element("settings").addEventListener("submit", (event) => {
  event.preventDefault();
  if (worker) {
    stop();
    showAll();
  } else start();
});
addEventListener("hashchange", () => {
  fromAddress();
  changed();
});
new ResizeObserver(() => shown && showPictures()).observe(element("pictures"));
fromAddress();
changed();

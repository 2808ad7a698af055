// The schedules, costs and static rivals of cpt_core in JavaScript: the same formulas, in the same order of operations, so
// that the doubles agree.  Plain ECMAScript without a page: tests/teaching/test_explorer.py runs it in V8.
// Names and numbers (the suite, limits, the length of a training) come from Python in `constants`.
"use strict";

function scheduleMath({ suite, rate, d, maxBits, maxCycles, steps }) {
  const rint = (x) => x + 6755399441055744 - 6755399441055744; // half to even, as numpy: a double there has no fraction

  // cpt_core/schedules/profiles.py: f(x), the falling cycle f(1 - x), and the other falling cycle 1 - f(x)
  const cosine = (x) => (1 - Math.cos(Math.PI * x)) / 2;
  const rex = (x) => x / (1 - d + d * x);
  const profiles = {
    linear: { growth: (x) => x, vertical: (x) => 1 - x },
    cosine: { growth: cosine, vertical: (x) => 1 - cosine(x) },
    exponential: {
      growth: (x) => 1 - Math.exp(-rate * x),
      horizontal: (x) => 1 - Math.exp(-rate * (1 - x)),
      vertical: (x) => Math.exp(-rate * x),
    },
    rex: { growth: (x) => 1 - rex(1 - x), horizontal: (x) => 1 - rex(x), vertical: (x) => rex(1 - x) },
  };

  function cyclic({ family, q_min, q_max, n_cycles }) {
    const { profile, triangular, mirror } = suite[family];
    return Uint8Array.from({ length: steps }, (_, t) => {
      const place = t * n_cycles; // integers until the last division
      const x = (place % steps) / steps;
      const falls = triangular && Math.floor(place / steps) % 2 === 0;
      return rint(q_min + (q_max - q_min) * profiles[profile][falls ? mirror : "growth"](x));
    });
  }

  // cpt_core/schedules/cost.py: one forward matmul, q x q, and two backward matmuls, q x gradient bits
  const products = (q, grade) => ({ forward: q * q, error: q * grade, weight: q * grade });
  const stepCost = (q, grade) => q * q + 2 * q * grade;
  const mean = (bits, f) => bits.reduce((sum, q) => sum + f(q), 0) / bits.length;

  // cpt_extras/search/allocation.py, static_of_cost: one precision, or the two next to the cost interleaved evenly
  function rivalBits(bits, { q_min, q_max, q_grad }) {
    const price = (q) => stepCost(q, q_grad) / stepCost(q_max, q_max);
    const budget = mean(bits, (q) => stepCost(q, q_grad)) / stepCost(q_max, q_max);
    let low = q_max;
    while (low > q_min && price(low) > budget * (1 + 1e-9)) low -= 1;
    const close = Math.abs(price(low) - budget) <= 1e-9 * Math.max(price(low), budget);
    if (low === q_max || close) return new Uint8Array(steps).fill(low);
    const above = Math.ceil(((budget - price(low)) / (price(low + 1) - price(low))) * steps);
    const spread = (q, n) => Array.from({ length: n }, (_, i) => [(i + 0.5) / n, q]);
    const order = [...spread(low, steps - above), ...spread(low + 1, above)].sort((a, b) => a[0] - b[0]);
    return Uint8Array.from(order, ([, q]) => q);
  }

  function staticName(bits) {
    const [low, high] = [Math.min(...bits), Math.max(...bits)];
    if (low === high) return `static ${low}`;
    return `static ${low} and ${high} mixed (${Math.round(100 * mean(bits, (q) => q - low))}\u00a0% of the steps at ${high})`;
  }

  function need(right, sentence) {
    if (!right) throw new RangeError(sentence);
  }

  function check(s) {
    const whole = (name, most) =>
      need(Number.isInteger(s[name]) && s[name] >= 1 && s[name] <= most, `${name} must be a whole number from 1 to ${most}.`);
    need(s.family in suite || s.family === "STATIC", `There is no schedule ${s.family}.`);
    for (const name of ["q_min", "q_max", "q_grad"]) whole(name, maxBits);
    whole("n_cycles", maxCycles);
    const lowest = s.family === "STATIC" ? "The bits" : "q_min";
    need(s.q_min <= s.q_max, `${lowest} must be at most q_max: ${s.q_min} is more than ${s.q_max}.`);
    need(
      !suite[s.family]?.triangular || s.n_cycles % 2 === 0,
      `${s.family} falls and rises in turn, so it needs an even number of cycles, or it ends at q_min; ${s.n_cycles} is odd.`,
    );
  }

  // What is trained, and what is shown of it; `evaluated`: the bits at which it is tested.
  function arm(name, bits, evaluated, s) {
    const reference = stepCost(s.q_max, s.q_max); // static q_max with gradients of q_max bits
    const part = (kind) => mean(bits, (q) => products(q, s.q_grad)[kind]) / reference;
    const relative_cost = mean(bits, (q) => stepCost(q, s.q_grad)) / reference;
    const spent = { forward: part("forward"), error: part("error"), weight: part("weight") };
    let sum = 0;
    const soFar = Array.from(bits, (q) => (sum += stepCost(q, s.q_grad)) / reference / steps);
    return { name, bits, evaluated, relative_cost, spent, soFar, q_grad: s.q_grad };
  }

  // The lines of Python that make both.
  function python(s) {
    const grade = `, q_grad=${s.q_grad}`;
    if (s.family === "STATIC") return `schedule = rival = cpt.StaticSchedule(${s.q_min}, total_steps=${steps})`;
    const between = `q_min=${s.q_min}, q_max=${s.q_max}, total_steps=${steps}`;
    return (
      `schedule = cpt.make_schedule("${s.family}", ${between}, n_cycles=${s.n_cycles})\n` +
      `rival = static_of_cost(schedule.relative_cost(${s.q_grad}), ${between}${grade})`
    );
  }

  // settings: {family, q_min (of STATIC its bits), q_max, q_grad, n_cycles}.  Throws a RangeError with a sentence for people.
  function explore(s) {
    check(s);
    const fixed = s.family === "STATIC";
    const bits = fixed ? new Uint8Array(steps).fill(s.q_min) : cyclic(s);
    const other = rivalBits(bits, s);
    const last = bits[steps - 1];
    return {
      chosen: arm(fixed ? staticName(bits) : s.family, bits, fixed ? s.q_min : s.q_max, s),
      rival: arm(staticName(other), other, Math.max(...other), s),
      same: bits.every((q, t) => q === other[t]),
      python: python(s),
      warning: fixed || last === s.q_max ? "" : `${s.family} ends at ${last} bits, not at q_max = ${s.q_max}: use fewer cycles.`,
    };
  }

  return { explore, rint };
}

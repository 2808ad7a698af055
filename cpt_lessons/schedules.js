// The schedules of cpt_core in JavaScript: the same formulas, in the same order of operations, so that the doubles agree.
// Plain ECMAScript without a page: a browser runs it in the explorer, tests/teaching/test_explorer.py in V8.
// Numbers and names (the suite, limits, tolerances) come from cpt_core in `constants`; they stand nowhere here.
"use strict";

function scheduleMath(constants) {
  const { suite, profiles, rate, d, maxBits, float32, tolerance, powers, maxSteps } = constants;

  // Half to even, as numpy.
  function rint(x) {
    const low = Math.floor(x);
    const over = x - low;
    if (over === 0.5) return low % 2 === 0 ? low : low + 1;
    return over < 0.5 ? low : low + 1;
  }

  // cpt_core/schedules/profiles.py: f(x), and the falling cycle f(1 - x) or 1 - f(x)
  const standard = {
    linear: { growth: (x) => x, vertical: (x) => 1 - x },
    cosine: {
      growth: (x) => (1 - Math.cos(Math.PI * x)) / 2,
      vertical: (x) => 1 - (1 - Math.cos(Math.PI * x)) / 2,
    },
    exponential: { growth: (x) => 1 - Math.exp(-rate * x), vertical: (x) => Math.exp(-rate * x) },
    rex: {
      growth: (x) => 1 - (1 - x) / (1 - d + d * (1 - x)),
      vertical: (x) => (1 - x) / (1 - d + d * (1 - x)),
      horizontal: (x) => 1 - x / (1 - d + d * x),
    },
  };

  function profileOf(name, power) {
    const base = standard[name];
    if (power === undefined) return { horizontal: (x) => base.growth(1 - x), ...base };
    const growth = (x) => base.growth(Math.pow(x, power));
    return {
      growth,
      vertical: (x) => base.vertical(Math.pow(x, 1 / power)),
      horizontal: (x) => growth(1 - x),
    };
  }

  // The precision of every step before rounding, as CyclicSchedule.values with its "exact" rule.
  function cyclicValues(s, steps, power) {
    const profile = profileOf(s.profile, power);
    const turned = s.mirror === "horizontal" ? profile.horizontal : profile.vertical;
    const values = new Float64Array(steps);
    const alike = steps % s.n_cycles === 0 ? Math.min((2 * steps) / s.n_cycles, steps) : steps;
    for (let t = 0; t < alike; t++) {
      const place = t * s.n_cycles; // integers until the last division
      const x = (place % steps) / steps;
      const falls = s.triangular && Math.floor(place / steps) % 2 === 0;
      values[t] = s.q_min + (s.q_max - s.q_min) * (falls ? turned(x) : profile.growth(x));
    }
    for (let t = alike; t < steps; t++) values[t] = values[t - alike];
    return values;
  }

  function rounded(values) {
    const bits = new Uint8Array(values.length);
    for (let t = 0; t < values.length; t++) bits[t] = rint(values[t]);
    return bits;
  }

  // cpt_core/schedules/cost.py: one forward and two backward products, gradients at q_max bits
  const stepCost = (q, grade) => q * q + 2 * q * grade;

  function countsOf(bits) {
    const counts = new Array(maxBits + 1).fill(0);
    for (const q of bits) counts[q] += 1;
    return counts;
  }

  const sumCost = (counts, top) => counts.reduce((sum, n, q) => sum + n * stepCost(q, top), 0);

  const costOf = (bits, top) => sumCost(countsOf(bits), top) / bits.length / stepCost(top, top);

  function need(right, sentence) {
    if (!right) throw new RangeError(sentence);
  }

  function check(s) {
    const whole = (name, least, most) =>
      need(
        Number.isInteger(s[name]) && s[name] >= least && s[name] <= most,
        `${name} must be a whole number from ${least} to ${most}.`,
      );
    const cyclic = s.family !== "STATIC";
    need(!cyclic || s.family in suite || profiles.includes(s.family), `There is no schedule ${s.family}.`);
    whole("q_max", 1, maxBits);
    if (cyclic) {
      whole("q_min", 1, maxBits);
      need(s.q_min <= s.q_max, `q_min must be at most q_max: ${s.q_min} is more than ${s.q_max}.`);
    }
    whole("total_steps", 1, maxSteps);
    need(s.delay >= 0 && s.delay < 1, "delay is a share of the training: at least 0 and less than 1.");
    const hold = rint(s.delay * s.total_steps);
    need(hold === 0 || hold < s.total_steps, `A delay of ${s.delay} leaves none of ${s.total_steps} steps to cycle in.`);
    if (!cyclic) {
      need(s.delay === 0, "STATIC has nothing to delay: its bits are q_max at every step. Set delay to 0.");
      need(s.budget === null, "STATIC has one precision, there is nothing to solve: choose another family, or no budget.");
      return 0;
    }
    const left = s.total_steps - hold;
    need(["horizontal", "vertical"].includes(s.mirror), "mirror is horizontal or vertical.");
    need(["q_max", "float32"].includes(s.delay_at), "A delay is held at q_max or at float32.");
    whole("n_cycles", 1, left);
    need(
      !s.triangular || s.n_cycles % 2 === 0,
      `A triangular schedule needs an even number of cycles, or it ends at q_min; ${s.n_cycles} is odd.`,
    );
    need(
      s.budget === null || s.delay_at === "q_max" || hold === 0,
      "A budget is solved with a delay at q_max: float32 steps cost more than any at q_max.",
    );
    return hold;
  }

  // cpt_core/choosing/solver.py, after scipy.optimize.bisect with xtol 1e-9: a staircase has no better method
  function bisect(excess, low, high) {
    const atLow = excess(low);
    let width = high - low;
    let middle = low;
    for (let i = 0; i < 100; i++) {
      width *= 0.5;
      middle = low + width;
      const here = excess(middle);
      if (Math.sign(here) === Math.sign(atLow)) low = middle;
      if (here === 0 || Math.abs(width) < 1e-9 + 4 * Number.EPSILON * Math.abs(middle)) break;
    }
    return middle;
  }

  // Bend the profile, f(x**power), until the steps that are not held cost what the budget leaves.
  function solve(s, hold) {
    const { budget, q_min, q_max, total_steps } = s;
    const steps = total_steps - hold;
    need(Number.isFinite(budget), "The budget must be a number: the cost relative to static q_max, such as 0.6.");
    if (Math.abs(budget - 1) <= tolerance) return new Uint8Array(total_steps).fill(q_max);
    need(q_min < q_max, `A budget of ${budget} cannot be met: q_min and q_max are both ${q_max}, and static bits cost 1.`);
    const lowest = (hold + steps * (stepCost(q_min, q_max) / stepCost(q_max, q_max))) / total_steps;
    need(
      budget >= lowest * (1 - tolerance) && budget <= 1,
      `A budget of ${budget} cannot be met between ${q_min} and ${q_max} bits` +
        `${hold ? ` with ${hold} of ${total_steps} steps held at ${q_max} bits` : ""}; ` +
        `budgets lie between ${lowest.toFixed(4)} and 1.`,
    );
    const share = hold ? (budget * total_steps - hold) / steps : budget;
    const bent = (exponent) => cyclicValues(s, steps, Math.pow(2, exponent));
    const excess = (exponent) => costOf(rounded(bent(exponent)), q_max) - share;
    const [low, high] = powers;
    const exponent = excess(low) <= 0 ? low : excess(high) >= 0 ? high : bisect(excess, low, high);
    const bits = adjusted(bent(exponent), s, budget * total_steps - hold, tolerance * budget * total_steps);
    const whole = new Uint8Array(total_steps).fill(q_max);
    whole.set(bits, hold);
    const spent = costOf(whole, q_max);
    need(
      Math.abs(spent - budget) <= tolerance * budget,
      `${total_steps} steps are too few to cost ${budget} to ${100 * tolerance} %; the nearest is ${spent.toFixed(4)}.`,
    );
    return whole;
  }

  // Move single steps by a bit, those nearest to it first, one or two at a time, until the cost is met.
  function adjusted(values, s, wanted, allowed) {
    const bits = rounded(values);
    const top = stepCost(s.q_max, s.q_max);
    let missing = wanted * top - sumCost(countsOf(bits), s.q_max);
    while (Math.abs(missing) > allowed * top) {
      const moves = possibleMoves(values, bits, s);
      let best = [];
      let left = Infinity;
      const consider = (chosen) => {
        const after = missing - chosen.reduce((sum, move) => sum + move.change, 0);
        if (Math.abs(after) < Math.abs(left)) [best, left] = [chosen, after];
      };
      moves.forEach((move) => consider([move]));
      moves.forEach((a, i) => moves.slice(i + 1).forEach((b) => a.step !== b.step && consider([a, b])));
      if (Math.abs(left) >= Math.abs(missing)) break;
      missing = left;
      for (const move of best) bits[move.step] = move.bits;
    }
    return bits;
  }

  // Of every precision, the step that is nearest to a bit more, and the one nearest to a bit less.
  function possibleMoves(values, bits, s) {
    const nearest = new Map();
    values.forEach((value, step) => {
      for (const way of [1, -1]) {
        const key = way * bits[step];
        const known = nearest.get(key);
        if (known === undefined || way * value > way * values[known]) nearest.set(key, step);
      }
    });
    const moves = [];
    for (let q = s.q_min; q <= s.q_max; q++) {
      for (const way of [1, -1]) {
        const step = nearest.get(way * q);
        const to = q + way;
        if (step !== undefined && to >= s.q_min && to <= s.q_max) {
          moves.push({ change: stepCost(to, s.q_max) - stepCost(q, s.q_max), step, bits: to });
        }
      }
    }
    return moves;
  }

  // The line of Python that makes the same schedule.
  function pythonLine(s, hold) {
    const truth = (flag) => (flag ? "True" : "False");
    const between = `q_min=${s.q_min}, q_max=${s.q_max}`;
    const delay = hold ? `, delay=${s.delay}` : "";
    if (s.family === "STATIC") return `cpt.make_schedule("STATIC", q_max=${s.q_max}, total_steps=${s.total_steps})`;
    const turned = s.triangular ? `, triangular=True, mirror="${s.mirror}"` : "";
    if (s.budget !== null) {
      return (
        `cpt.solve_schedule(${s.budget}, ${between}, total_steps=${s.total_steps}, n_cycles=${s.n_cycles}, ` +
        `family="${s.profile}"${turned}${delay})`
      );
    }
    if (s.family in suite) {
      const at = hold && s.delay_at === "float32" ? ', delay_at="float32"' : "";
      const steps = `total_steps=${s.total_steps}, n_cycles=${s.n_cycles}`;
      return `cpt.make_schedule("${s.family}", ${between}, ${steps}${delay}${at})`;
    }
    const cycles =
      `cpt.CyclicSchedule(cpt.schedules.PROFILES["${s.profile}"](), ${between}, ` +
      `total_steps=${s.total_steps - hold}, n_cycles=${s.n_cycles}${turned})`;
    if (!hold) return cycles;
    return `cpt.DelayedSchedule(${cycles}, hold=${hold}${s.delay_at === "float32" ? `, level=${float32}` : ""})`;
  }

  // What the settings of a page mean: a named schedule brings its profile, and how it is turned.
  function resolved(settings) {
    const entry = suite[settings.family];
    return entry ? { ...settings, ...entry } : { ...settings, profile: settings.family };
  }

  // Everything that is shown of a schedule.  Throws a RangeError whose message is a sentence for people.
  // settings: {family, triangular, mirror, q_min, q_max, n_cycles, total_steps, delay, delay_at, budget or null}
  function explore(settings) {
    const s = resolved(settings);
    const hold = check(s);
    const total = s.total_steps;
    let bits;
    let held = s.q_max;
    if (s.family === "STATIC") bits = new Uint8Array(total).fill(s.q_max);
    else if (s.budget !== null) bits = solve(s, hold);
    else {
      if (s.delay_at === "float32") held = float32;
      bits = new Uint8Array(total).fill(held);
      bits.set(rounded(cyclicValues(s, total - hold)), hold);
    }
    const counts = countsOf(bits);
    let work = sumCost(counts, s.q_max);
    // gradients of float32 steps are not quantised either
    if (hold && held === float32) work += hold * (stepCost(float32, float32) - stepCost(float32, s.q_max));
    const noise = counts.reduce((sum, n, q) => sum + n * Math.pow(4, s.q_max - q), 0);
    const last = bits[total - 1];
    return {
      bits,
      hold,
      held,
      relative_cost: work / total / stepCost(s.q_max, s.q_max),
      noise_exposure: noise / total,
      shares: counts.map((n, q) => ({ bits: q, share: n / total })).filter((row) => row.share > 0),
      savings: s.family === "STATIC" ? "none" : s.budget === null ? s.savings : undefined,
      line: pythonLine(s, hold),
      warning:
        last === s.q_max
          ? ""
          : `The schedule ends at ${last} bits, not at q_max = ${s.q_max}: use fewer cycles or more steps.`,
    };
  }

  return { explore, rint };
}

// Of every experiment with this q_max, to which costs are relative: [experiment, its arms that cost this, within a share].
function armsAtCost(experiments, cost, q_max, within) {
  const near = (arm) => Math.abs(arm.relative_cost / cost - 1) <= within;
  return experiments.filter((e) => e.q_max === q_max).map((e) => [e, e.arms.filter(near)]);
}

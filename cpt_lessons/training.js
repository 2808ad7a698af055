// The 25 lines of notebook 00 in JavaScript, and the trainings of the page.  The rounding and the noise are those of
// cpt_core to the last bit; tests/teaching/test_explorer.py compares both, and steps of training, with the library in V8.
// In the page a worker runs this file; it needs nothing else.
"use strict";

const f32 = Math.fround;
const HALF_TO_EVEN = 6755399441055744; // a double of this size has no fraction left

// --- cpt_core/quantization/rounding.py: noise of a key, and rounding to a grid ---------------------------

function halvesOf(key) {
  let z = BigInt.asUintN(64, key + 0x9e3779b97f4a7c15n);
  z = BigInt.asUintN(64, (z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
  z = BigInt.asUintN(64, (z ^ (z >> 27n)) * 0x94d049bb133111ebn);
  z ^= z >> 31n;
  return [Number(BigInt.asIntN(32, z)), Number(BigInt.asIntN(32, z >> 32n))];
}

// Numbers in (-0.5, 0.5), a pure function of the key (a BigInt) and of the place; a hash serves two neighbours.
function noiseOf(key, count) {
  const [first, second] = halvesOf(key);
  const noise = new Float32Array(count);
  for (let i = 0; i < count; i += 2) {
    let h = (i >> 1) ^ first;
    h = Math.imul(h ^ (h >>> 16), 0x7feb352d) ^ second;
    h = Math.imul(h ^ (h >>> 15), 0x846ca68b);
    h ^= h >>> 16;
    noise[i] = (h & 0xffff) / 65536 + (1 / 131072 - 0.5);
    if (i + 1 < count) noise[i + 1] = (h >>> 16) / 65536 + (1 / 131072 - 0.5);
  }
  return noise;
}

// Round x to 2**bits values between the least and the greatest; rows: parts with ranges of their own; key: of the noise.
function rounded(x, bits, rows = 1, key = null) {
  const n = 2 ** bits - 1;
  const length = x.length / rows;
  const out = new Float32Array(x.length);
  const noise = key === null ? null : noiseOf(key, x.length);
  for (let row = 0; row < rows; row++) {
    const [start, end] = [row * length, (row + 1) * length];
    let low = Infinity;
    let high = -Infinity;
    for (let i = start; i < end; i++) {
      if (x[i] < low) low = x[i];
      if (x[i] > high) high = x[i];
    }
    const scale = Math.max(f32(f32(high - low) / n), f32(1e-8));
    for (let i = start; i < end; i++) {
      let place = f32(f32(x[i] - low) / scale);
      if (noise !== null) place = Math.min(Math.max(f32(place + noise[i]), 0), n);
      out[i] = f32(f32((place + HALF_TO_EVEN - HALF_TO_EVEN) * scale) + low);
    }
  }
  return out;
}

// --- notebook 00: a layer, the network, a step ------------------------------------------------------

// The product of a, (n, depth), and b, (depth, m), m even.  Two sums at a time, over what is not 0 in a row of a: half of
// the pixels and of the hidden values are.  Three times as fast as the plain loops.
function product(a, b, n, depth, m) {
  const out = new Float32Array(n * m);
  const [values, places] = [new Float64Array(depth), new Int32Array(depth)];
  for (let i = 0; i < n; i++) {
    let count = 0;
    for (let k = 0; k < depth; k++) {
      const value = a[i * depth + k];
      if (value === 0) continue;
      values[count] = value;
      places[count] = k * m;
      count += 1;
    }
    for (let o = 0; o < m; o += 2) {
      let first = 0;
      let second = 0;
      for (let j = 0; j < count; j++) {
        const value = values[j];
        const at = places[j] + o;
        first += value * b[at];
        second += value * b[at + 1];
      }
      out[i * m + o] = first;
      out[i * m + o + 1] = second;
    }
  }
  return out;
}

// Rows become columns.
function turned(x, rows) {
  const columns = x.length / rows;
  const out = new Float32Array(x.length);
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) out[j * rows + i] = x[i * columns + j];
  return out;
}

// y = x w' + b of n rounded inputs; the factors that the backward products need stay with the layer.
function forward(layer, x, n, bits) {
  const [inputs, outputs] = [x.length / n, layer.bias.length];
  const [a, w, b] = [rounded(x, bits), rounded(layer.weight, bits, outputs), rounded(layer.bias, bits)];
  layer.factors = [a, w];
  const y = product(a, turned(w, outputs), n, inputs, outputs);
  for (let i = 0; i < y.length; i += outputs) for (let o = 0; o < outputs; o++) y[i + o] += b[o];
  return y;
}

// Round the gradient of y, with noise; move weight and bias; return a function that gives the gradient of x.
function backward(layer, gradient, n, bits, rate) {
  const [a, w] = layer.factors;
  const [inputs, outputs] = [a.length / n, layer.bias.length];
  const g = rounded(gradient, bits, 1, layer.key);
  layer.key += 1n;
  const ofWeight = turned(product(turned(a, n), g, inputs, n, outputs), inputs);
  for (let i = 0; i < w.length; i++) layer.weight[i] -= rate * ofWeight[i];
  for (let i = 0; i < g.length; i += outputs) for (let o = 0; o < outputs; o++) layer.bias[o] -= rate * g[i + o];
  return () => product(g, w, n, outputs, inputs);
}

function network([first, second], x, n, bits) {
  const hidden = forward(first, x, n, bits);
  for (let j = 0; j < hidden.length; j++) if (hidden[j] < 0) hidden[j] = 0;
  return [hidden, forward(second, hidden, n, bits)];
}

// One step on n pictures; returns the loss, the mean cross entropy.
function step(layers, x, labels, n, bits, q_grad, rate) {
  const [hidden, scores] = network(layers, x, n, bits);
  const classes = scores.length / n;
  let loss = 0;
  for (let i = 0; i < n; i++) {
    const mine = scores.subarray(i * classes, (i + 1) * classes);
    const top = Math.max(...mine);
    const right = mine[labels[i]] - top;
    let sum = 0;
    for (const score of mine) sum += Math.exp(score - top);
    loss += (Math.log(sum) - right) / n;
    for (let c = 0; c < classes; c++) mine[c] = (Math.exp(mine[c] - top) / sum - (c === labels[i] ? 1 : 0)) / n;
  }
  const gradient = backward(layers[1], scores, n, q_grad, rate)();
  for (let j = 0; j < gradient.length; j++) if (!(hidden[j] > 0)) gradient[j] = 0;
  backward(layers[0], gradient, n, q_grad, rate);
  return loss;
}

function accuracy(layers, x, labels, bits) {
  const [, scores] = network(layers, x, labels.length, bits);
  const classes = scores.length / labels.length;
  let right = 0;
  labels.forEach((label, i) => {
    const mine = scores.subarray(i * classes, (i + 1) * classes);
    if (mine.indexOf(Math.max(...mine)) === label) right += 1;
  });
  return right / labels.length;
}

// --- the trainings of the page ----------------------------------------------------------------------

// What a seed chooses: pictures to learn from and to test on, the batches, first weights, and the noise of gradients.
function chosenBy(seed, { images, labels, steps, batch, learn }) {
  const key = (what) => ((BigInt(seed) << 8n) | BigInt(what)) << 20n;
  const below = (n, u) => Math.floor((u + 0.5) * n);
  const order = Array.from(labels, (_, i) => i);
  const turns = noiseOf(key(0), order.length);
  for (let i = order.length - 1; i > 0; i--) {
    const j = below(i + 1, turns[i]);
    [order[i], order[j]] = [order[j], order[i]];
  }
  const pixels = images.length / labels.length;
  const taken = (places) => {
    const x = new Float32Array(places.length * pixels);
    places.forEach((p, i) => x.set(images.subarray(p * pixels, (p + 1) * pixels), i * pixels));
    return [x, places.map((p) => labels[p])];
  };
  const drawn = Array.from(noiseOf(key(1), steps * batch), (u) => order[below(learn, u)]);
  const batches = Array.from({ length: steps }, (_, t) => taken(drawn.slice(t * batch, (t + 1) * batch)));
  const layer = (i, outputs) => {
    const start = (n, what) => noiseOf(key(what), n).map((u) => (2 * u) / Math.sqrt(64)); // as torch.nn.Linear: 64 inputs
    return { weight: start(outputs * 64, 2 + i), bias: start(outputs, 4 + i), key: key(6 + i) };
  };
  return { test: taken(order.slice(learn)), batches, layers: () => [layer(0, 64), layer(1, 10)] };
}

// Train every arm with every seed, all at once; after every `every` steps yield {step, loss, accuracy}, both [arm][seed].
function* train({ arms, seeds, rate, every, ...given }) {
  const chosen = Array.from({ length: seeds }, (_, seed) => chosenBy(seed, given));
  const models = arms.map(() => chosen.map((c) => c.layers()));
  for (let start = 0; start < given.steps; start += every) {
    const end = Math.min(start + every, given.steps);
    const found = { step: end, loss: [], accuracy: [] };
    arms.forEach((arm, a) => {
      const learned = chosen.map(({ batches }, seed) => {
        let loss = 0;
        for (let t = start; t < end; t++) {
          const [x, labels] = batches[t];
          loss += step(models[a][seed], x, labels, labels.length, arm.bits[t], arm.q_grad, rate);
        }
        return loss / (end - start);
      });
      found.loss.push(learned);
      found.accuracy.push(chosen.map(({ test }, seed) => accuracy(models[a][seed], ...test, arm.evaluated)));
    });
    yield found;
  }
}

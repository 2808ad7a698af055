// The recurrence of a quantised LSTM on a CPU, see lstm.py: products, sigmoid and tanh are torch's own on the same
// slices as there, and so is addcmul, which fuses its multiply-add. What lies between them is a loop or two per step.
// On codes, which tables of columns ask for, a step's product with the weights is one of int8 matrices.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/alignment.h>

#include <limits>

namespace {

using at::SymInt;
using at::SymIntArrayRef;

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Eight = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The rows of the steps: where each begins, and how many there are; in the order in which they are computed.
std::vector<std::pair<int64_t, int64_t>> rows_of(int64_t rows, int64_t steps, at::IntArrayRef sizes, bool reverse) {
  std::vector<std::pair<int64_t, int64_t>> found;
  int64_t at = 0;
  for (int64_t t = 0; t < steps; ++t) {
    const int64_t size = sizes.empty() ? rows / steps : sizes[t];
    found.emplace_back(at, size);
    at += size;
  }
  if (reverse) std::reverse(found.begin(), found.end());
  return found;
}

bool is_float(std::initializer_list<const Tensor*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](auto x) { return x->scalar_type() == at::kFloat; });
}

Tensor first_rows(const Tensor& x, int64_t rows) { return x.size(0) == rows ? x : x.narrow(0, 0, rows); }

// A slice as a product takes it: beginning where a new tensor would. With MKL on an AMD processor the last digits of a
// product depend on where in memory an operand begins.
Tensor aligned(const Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % c10::gAlignment ? x.clone() : x;
}

int64_t onednn_least = std::numeric_limits<int64_t>::max();

// out = x w + bias, by the library of such a product, see gemm_backend.py.
void product_out(Tensor& out, const Tensor& x, const Tensor& w, const optional<Tensor>& bias) {
  if (x.numel() * w.size(1) >= onednn_least) {
    using Signature = Tensor(const Tensor&, const Tensor&, const optional<Tensor>&, std::string_view,
                             c10::List<optional<at::Scalar>>, optional<std::string_view>);
    static const auto op = operator_named<Signature>("mkldnn::_linear_pointwise");
    out.copy_(op.call(aligned(x), w.t(), bias, "none", c10::List<optional<at::Scalar>>(), ""));
  } else if (bias) {
    at::addmm_out(out, *bias, aligned(x), w);
  } else {
    at::mm_out(out, aligned(x), w);
  }
}

// Calls f(row) for `rows` rows of `width` elements.
template <typename F>
void by_rows(int64_t rows, int64_t width, const F& f) {
  at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

// gates += the part of the input, (rows, 4 width) each
void add_input(const float* x_gates, float* gates, int64_t rows, int64_t width) {
  by_rows(rows, 4 * width, [&](int64_t row) {
    const float* __restrict x = x_gates + row * 4 * width;
    float* __restrict y = gates + row * 4 * width;
    for (int64_t j = 0; j < 4 * width; ++j) y[j] += x[j];
  });
}

// c = c f + i g, from gates (rows, 4, width)
void next_cell(const float* gates, float* c, int64_t rows, int64_t width) {
  by_rows(rows, width, [&](int64_t row) {
    const float *__restrict i = gates + row * 4 * width, *__restrict f = i + width, *__restrict g = f + width;
    float* __restrict cell = c + row * width;
    for (int64_t j = 0; j < width; ++j) {
      const float kept = cell[j] * f[j], added = i[j] * g[j];
      cell[j] = kept + added;
    }
  });
}

// h = o tanh(c), twice
void next_hidden(const float* gates, const float* tanh_c, float* out, float* state, int64_t rows, int64_t width) {
  by_rows(rows, width, [&](int64_t row) {
    const float *__restrict o = gates + (row * 4 + 3) * width, *__restrict tanh = tanh_c + row * width;
    float *__restrict a = out + row * width, *__restrict b = state + row * width;
    for (int64_t j = 0; j < width; ++j) a[j] = b[j] = o[j] * tanh[j];
  });
}

// Puts the hidden state on the grid, a range for all of it, into `out`: its values or its codes.
void on_grid(const float* h, const Tensor& out, const optional<float>& levels, float* low, float* width, bool stored) {
  const int64_t n = out.numel();
  if (!levels) {
    std::copy(h, h + n, out.mutable_data_ptr<float>());
    return;
  }
  const Layout l = Layout::whole(n);
  const Grid g{*levels, stored, std::nullopt};
  if (out.scalar_type() == at::kChar) {
    rounded(l, h, out.mutable_data_ptr<int8_t>(), low, width, g, !stored);
  } else {
    rounded(l, h, out.mutable_data_ptr<float>(), low, width, g, !stored);
  }
}

// What `affine_` takes of the columns of a product on codes; undefined where the product is one of values.
struct Columns {
  Tensor codes, values;

  Columns(const optional<Tensor>& a, const optional<Tensor>& b) {
    if (a && b) codes = *a, values = *b;
  }
  explicit operator bool() const { return codes.defined(); }
};

// out (rows, columns), float32, = codes (rows, n), on one range or a range each, times weight (n, columns)
void multiply(const Tensor& out, const Tensor& codes, const float* low, const float* width, bool by_row, float levels,
              const Tensor& weight, const Columns& columns) {
  const int64_t rows = codes.size(0), n = codes.size(1);
  const float half = (levels + 1.f) / 2.f;
  Tensor row_codes = at::empty({2, rows}, codes.options().dtype(at::kInt));
  Tensor row_values = at::empty({3, rows}, codes.options().dtype(at::kFloat));
  int32_t* whole = row_codes.mutable_data_ptr<int32_t>();
  float* values = row_values.mutable_data_ptr<float>();
  const int8_t* k = codes.const_data_ptr<int8_t>();
  for (int64_t row = 0; row < rows; ++row, k += n) {
    int32_t sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += k[j];
    const float from = low[by_row ? row : 0], scale = scale_of(width[by_row ? row : 0], levels);
    const float near = std::rint(-from / scale - half), zero = near == near ? std::clamp(near, -128.f, 127.f) : 0.f;
    whole[row] = sum;
    whole[rows + row] = static_cast<int32_t>(zero);
    values[row] = scale;
    values[rows + row] = scale * static_cast<float>(sum - static_cast<int32_t>(n) * whole[rows + row]);
    values[2 * rows + row] = (zero + half) * scale + from;
  }
  Tensor sums = out.view(at::kInt);
  at::_int_mm_out(sums, codes, weight);
  affine_(sums, row_codes, row_values, columns.codes, columns.values);
}

Eight lstm_forward(const Tensor& x_gates, const Tensor& weight, const optional<Tensor>& bias, const Tensor& h0,
                   const Tensor& c0, SymInt step_count, SymIntArrayRef step_sizes, bool reverse,
                   const optional<Tensor>& levels, std::string_view granularity, const optional<Tensor>& low,
                   const optional<Tensor>& width, const optional<Tensor>& filled, bool save,
                   const optional<Tensor>& grad_levels, std::string_view grad_granularity, const optional<Tensor>& key,
                   bool advance, const optional<Tensor>& column_codes, const optional<Tensor>& column_values) {
  const Columns columns(column_codes, column_values);
  if (!is_float({&x_gates, &h0, &c0}) || !(columns || is_float({&weight})) || (levels && granularity != "per_tensor") ||
      x_gates.numel() == 0) {
    return reference<decltype(lstm_forward)>("lstm_forward", x_gates, weight, bias, h0, c0, step_count, step_sizes,
                                             reverse, levels, granularity, low, width, filled, save, grad_levels,
                                             grad_granularity, key, advance, column_codes, column_values);
  }
  const int64_t rows = x_gates.size(0), n = weight.size(1), steps = step_count.expect_int();
  const auto parts = rows_of(rows, steps, C10_AS_INTARRAYREF_SLOW(step_sizes), reverse);
  int64_t most = 0;
  for (auto [at, size] : parts) most = std::max(most, size);
  const Tensor added = x_gates.contiguous(), w = weight.t();
  const int64_t kept = save ? rows : most;  // else every step overwrites the one before
  Tensor hidden = at::empty({rows, n}, added.options()), gates = at::empty({kept, 4 * n}, added.options());
  Tensor operands = at::empty({kept, n}, added.options().dtype(columns ? at::kChar : at::kFloat)), before = at::empty_like(operands, at::kFloat);
  Tensor tanh_c = at::empty_like(before);
  Tensor h = h0.clone(at::MemoryFormat::Contiguous), c = c0.clone(at::MemoryFormat::Contiguous);
  optional<float> top;
  if (levels) top = number(*levels);
  const bool stored = low.has_value(), taken = stored && (!filled || number(*filled) > 0.f);
  const bool told = columns || (top && !stored);
  Tensor ranges = at::empty({2, told ? steps : 0}, added.options());
  float* state = h.mutable_data_ptr<float>();
  float* cell = c.mutable_data_ptr<float>();
  for (int64_t t = 0; t < steps; ++t) {
    const auto [from, size] = parts[t];
    const int64_t at = save ? from : 0;
    Tensor operand = operands.narrow(0, at, size), step = gates.narrow(0, at, size), tanh = tanh_c.narrow(0, at, size);
    float found[2];
    if (taken) {
      found[0] = number(*low);
      found[1] = number(*width);
    }
    if (stored && (!taken || columns)) {  // its own range, and the operations of one that is stored
      float own[2];
      ::ranges(Layout::whole(size * n), state, &own[0], &own[1]);
      if (!taken) std::copy(own, own + 2, found);
      if (own[0] != own[0]) found[0] = own[0];  // NaN has no code: the range is NaN then
    }
    on_grid(state, operand, top, &found[0], &found[1], stored);
    if (told) {
      ranges.mutable_data_ptr<float>()[t] = found[0];
      ranges.mutable_data_ptr<float>()[steps + t] = found[1];
    }
    if (columns) {
      multiply(step, operand, &found[0], &found[1], false, *top, w, columns);
    } else {
      product_out(step, operand, w, bias);
    }
    add_input(added.const_data_ptr<float>() + from * 4 * n, step.mutable_data_ptr<float>(), size, n);
    step.narrow(1, 0, 2 * n).sigmoid_();
    step.narrow(1, 2 * n, n).tanh_();
    step.narrow(1, 3 * n, n).sigmoid_();
    const float* four = step.const_data_ptr<float>();
    if (save) std::copy(cell, cell + size * n, before.mutable_data_ptr<float>() + at * n);
    next_cell(four, cell, size, n);
    at::tanh_out(tanh, first_rows(c, size));
    next_hidden(four, tanh.const_data_ptr<float>(), hidden.mutable_data_ptr<float>() + from * n, state, size, n);
  }
  auto saved = [&](const Tensor& x) { return save ? x : at::empty({0}, added.options()); };
  return {hidden, h, c, ranges, saved(gates), saved(operands), saved(before), saved(tanh_c)};
}

// What a step of the backward pass reads and writes, (rows, width) each; four of these for gates and their gradients.
struct Step {
  const float *d_out, *d_h, *gates, *before, *tanh_c;
  float *dh, *dc, *to_c, *d_gates, *d_c;
};

// dh = d_out + d_h, and what it is multiplied with on its way to c
void through_output(const Step& s, int64_t rows, int64_t width) {
  by_rows(rows, width, [&](int64_t row) {
    const int64_t at = row * width;
    const float *__restrict d_out = s.d_out + at, *__restrict d_h = s.d_h + at, *__restrict tanh = s.tanh_c + at;
    const float* __restrict o = s.gates + 4 * at + 3 * width;
    float *__restrict dh = s.dh + at, *__restrict to_c = s.to_c + at;
    for (int64_t j = 0; j < width; ++j) {
      dh[j] = d_out[j] + d_h[j];
      to_c[j] = o[j] * (1.f - tanh[j] * tanh[j]);
    }
  });
}

// the gradients of the four gates before sigmoid and tanh, and of the cell state before the step
void through_gates(const Step& s, int64_t rows, int64_t width) {
  by_rows(rows, width, [&](int64_t row) {
    const int64_t at = row * width;
    const float *__restrict i = s.gates + 4 * at, *__restrict f = i + width, *__restrict g = f + width;
    const float *__restrict o = g + width, *__restrict before = s.before + at, *__restrict tanh = s.tanh_c + at;
    const float *__restrict dh = s.dh + at, *__restrict dc = s.dc + at;
    float *__restrict to = s.d_gates + 4 * at, *__restrict d_c = s.d_c + at;
    for (int64_t j = 0; j < width; ++j) {
      to[j] = i[j] * (1.f - i[j]) * g[j] * dc[j];
      to[width + j] = f[j] * (1.f - f[j]) * before[j] * dc[j];
      to[2 * width + j] = (1.f - g[j] * g[j]) * i[j] * dc[j];
      to[3 * width + j] = o[j] * (1.f - o[j]) * tanh[j] * dh[j];
      d_c[j] = dc[j] * f[j];
    }
  });
}

Four lstm_backward(const Tensor& d_out, const Tensor& d_h, const Tensor& d_c, const Tensor& weight, const Tensor& gates,
                   const Tensor& before, const Tensor& tanh_c, SymInt step_count, SymIntArrayRef step_sizes, bool reverse,
                   const optional<Tensor>& grad_levels, std::string_view grad_granularity, const optional<Tensor>& key,
                   const optional<Tensor>& column_codes, const optional<Tensor>& column_values) {
  const std::string granularity(grad_granularity);
  const Columns columns(column_codes, column_values);
  if (!is_float({&d_out, &d_h, &d_c, &gates}) || !(columns || is_float({&weight})) || gates.numel() == 0 ||
      (grad_levels && !kept_of(gates, granularity))) {
    return reference<decltype(lstm_backward)>("lstm_backward", d_out, d_h, d_c, weight, gates, before, tanh_c,
                                              step_count, step_sizes, reverse, grad_levels, grad_granularity, key,
                                              column_codes, column_values);
  }
  const int64_t rows = gates.size(0), n = weight.size(1), most = d_h.size(0), steps = step_count.expect_int();
  const Tensor from_out = d_out.contiguous();
  Tensor state = d_h.clone(at::MemoryFormat::Contiguous), cell = d_c.clone(at::MemoryFormat::Contiguous);
  Tensor d_gates = at::empty_like(gates), behind = grad_levels ? at::empty_like(gates) : d_gates;
  Tensor dh = at::empty({most, n}, gates.options()), dc = at::empty_like(dh), to_c = at::empty_like(dh);
  Tensor now = key ? key->clone() : Tensor();
  const auto parts = rows_of(rows, steps, C10_AS_INTARRAYREF_SLOW(step_sizes), !reverse);
  for (auto [from, size] : parts) {
    const int64_t at = from * n;
    Tensor after = behind.narrow(0, from, size), part_h = first_rows(state, size), part_c = first_rows(cell, size);
    const Step s{from_out.const_data_ptr<float>() + at,     part_h.const_data_ptr<float>(),
                 gates.const_data_ptr<float>() + 4 * at,    before.const_data_ptr<float>() + at,
                 tanh_c.const_data_ptr<float>() + at,       dh.mutable_data_ptr<float>(),
                 dc.mutable_data_ptr<float>(),              to_c.mutable_data_ptr<float>(),
                 d_gates.mutable_data_ptr<float>() + 4 * at, part_c.mutable_data_ptr<float>()};
    through_output(s, size, n);
    Tensor sum = first_rows(dc, size);
    at::addcmul_out(sum, part_c, first_rows(dh, size), first_rows(to_c, size));
    through_gates(s, size, n);
    const Tensor before_grid = d_gates.narrow(0, from, size);
    const optional<Tensor> noise = key ? optional<Tensor>(now) : std::nullopt;
    if (columns) {
      const auto [low, width] = range(before_grid, granularity);
      const Tensor codes = encode(before_grid, low, width, *grad_levels, noise, noise.has_value(), false);
      after.copy_(codes).add_((*grad_levels + 1) / 2).mul_((width / *grad_levels).clamp_min(MIN_SCALE)).add_(low);
      multiply(part_h, codes, low.const_data_ptr<float>(), width.const_data_ptr<float>(), low.numel() > 1,
               number(*grad_levels), weight, columns);
    } else {
      if (grad_levels) quantized(before_grid, after, *grad_levels, granularity, noise);
      product_out(part_h, after, weight, std::nullopt);
    }
    if (key) ++*now.mutable_data_ptr<int64_t>();
  }
  return {d_gates, grad_levels ? behind : at::empty({0}, gates.options()), state, cell};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cpt, m) {
  m.def("onednn_from(int least) -> ()", [](int64_t least) { onednn_least = least; });
}

TORCH_LIBRARY_IMPL(cpt, CPU, m) {
  m.impl("lstm_forward", lstm_forward);
  m.impl("lstm_backward", lstm_backward);
}

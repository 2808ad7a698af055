// The operators of a CPU, see operators.py for what they are.

#include <ATen/autocast_mode.h>
#include <ATen/core/TorchDispatchUtils.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <string>
#include <tuple>

#include "blocks.h"
#include "graph.h"
#include "grid.h"
#include "integer.h"
#include "pixels.h"

namespace {

constexpr auto UNDER_AUTOCAST =
    "backward() runs under autocast, which rounds the results of quantised matmuls once more; leave its block before";
constexpr float RUNNING_DECAY = 0.9f, NEW_SHARE = 0.1f;

// The shape of the ranges of a granularity: which dimensions are kept, and how many there are.
struct Kept {
  std::vector<bool> mask;
  std::vector<int64_t> shape;
};

optional<Kept> kept_of(const Tensor& x, const std::string& granularity) {
  const int64_t dims = x.dim();
  Kept k;
  k.mask.assign(dims, false);
  if (granularity == "per_tensor" || (granularity == "per_channel" && dims < 2) ||
      (granularity == "per_position" && dims < 3)) {
    return k;
  }
  if (granularity == "per_channel") {
    k.mask[0] = true;
  } else if (granularity == "per_row") {
    for (int64_t d = 0; d < dims - 1; ++d) k.mask[d] = true;
  } else if (granularity == "per_position") {
    for (int64_t d = 1; d < dims - 1; ++d) k.mask[d] = true;
  } else {
    return std::nullopt;
  }
  for (int64_t d = granularity == "per_position" ? 1 : 0; d < dims; ++d) k.shape.push_back(k.mask[d] ? x.size(d) : 1);
  return k;
}

// An empty tensor for ranges: the shape that broadcasts to x, its numbers in the order in which x lies in memory.
Tensor empty_ranges(const Tensor& x, const Kept& kept, const Layout& l) {
  std::vector<int64_t> strides(x.dim(), 1);
  int64_t next = 1;
  for (auto d = l.order.rbegin(); d != l.order.rend(); ++d) {
    if (kept.mask[*d]) {
      strides[*d] = next;
      next *= x.size(*d);
    }
  }
  const size_t skipped = kept.mask.size() - kept.shape.size();
  if (kept.shape.empty()) return at::empty({}, x.options());
  return at::empty_strided(kept.shape, std::vector<int64_t>(strides.begin() + skipped, strides.end()), x.options());
}

float number(const Tensor& levels) { return *levels.const_data_ptr<float>(); }

Grid grid_of(const Tensor& levels, const optional<Tensor>& key, bool clip) {
  TORCH_CHECK(levels.numel() == 1 && levels.scalar_type() == at::kFloat, "levels must be one float32");
  Grid g{number(levels), clip, std::nullopt};
  if (key) {
    TORCH_CHECK(key->numel() == 1 && key->scalar_type() == at::kLong, "the key of the noise must be one int64");
    g.key.emplace(*key->const_data_ptr<int64_t>());
  }
  return g;
}

// x in float32 and without gaps, its dimensions in memory as torch would lay out a result of it.
Tensor dense(const Tensor& x) {
  if (x.scalar_type() == at::kFloat && memory_order(x)) return x;
  Tensor y = at::empty_like(x, x.options().dtype(at::kFloat));
  return y.copy_(x);
}

template <typename Signature>
auto operator_named(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").template typed<Signature>();
}

template <typename Signature, typename... Args>
auto reference(const std::string& name, Args&&... args) {
  return operator_named<Signature>("cpt_reference::" + name).call(std::forward<Args>(args)...);
}

std::tuple<Tensor, Tensor> range(const Tensor& x, std::string_view granularity) {
  const auto kept = kept_of(x, GridName(granularity).granularity);
  const Tensor held = dense(x);
  const auto l = kept ? layout_of(held, kept->mask) : std::nullopt;
  if (!l || x.numel() == 0) {
    return reference<decltype(range)>("range", x, granularity);
  }
  Tensor low = empty_ranges(held, *kept, *l), width = at::empty_like(low);
  ranges(*l, held.const_data_ptr<float>(), low.mutable_data_ptr<float>(), width.mutable_data_ptr<float>());
  return {low, width};
}

using Three = std::tuple<Tensor, Tensor, Tensor>;

// A grid of ranges of its own.
Grid own_grid(const Tensor& levels, const optional<Tensor>& key, const GridName& name) {
  Grid g = grid_of(levels, key, key.has_value() || name.zero);
  g.zero = name.zero;
  return g;
}

// `out` may be `held` itself
optional<Three> quantized(const Tensor& held, Tensor out, const Tensor& levels, const std::string& granularity,
                          const optional<Tensor>& key) {
  const GridName name(granularity);
  const auto kept = kept_of(held, name.granularity);
  const auto l = kept ? layout_of(held, kept->mask) : std::nullopt;
  if (!l) return std::nullopt;
  Tensor low = empty_ranges(held, *kept, *l), width = at::empty_like(low);
  if (!out.defined()) out = at::empty_like(held);
  rounded(*l, held.const_data_ptr<float>(), out.mutable_data_ptr<float>(), low.mutable_data_ptr<float>(),
          width.mutable_data_ptr<float>(), own_grid(levels, key, name), true);
  return Three{out, low, width};
}

// A rounded tensor, and the first of its ranges.
struct OnGrid {
  Tensor y;
  float low, width;
};

// x rounded on its own ranges, to `out` if that is defined, which may be x itself.
optional<OnGrid> round_dense(const Tensor& x, Tensor out, const Tensor& levels, const std::string& granularity,
                             const optional<Tensor>& key) {
  const GridName name(granularity);
  const auto l = x.is_contiguous() ? row_by_row(x, name.granularity) : std::nullopt;
  if (!l) {
    auto found = quantized(x, out, levels, granularity, key);
    if (!found) return std::nullopt;
    auto& [y, low, width] = *found;
    return OnGrid{y, *low.const_data_ptr<float>(), *width.const_data_ptr<float>()};
  }
  std::vector<float> ranges(2 * l->k1);
  if (!out.defined()) out = at::empty_like(x);
  rounded(*l, x.const_data_ptr<float>(), out.mutable_data_ptr<float>(), ranges.data(), ranges.data() + l->k1,
          own_grid(levels, key, name), true);
  return OnGrid{out, ranges[0], ranges[l->k1]};
}

Tensor round_in_range(const Tensor& x, const Tensor& low, const Tensor& width, const Tensor& levels,
                      std::string_view grid, const optional<Tensor>& key, bool clip) {
  return operator_named<decltype(round_in_range)>("cpt::round_in_range").call(x, low, width, levels, grid, key, clip);
}

Three fake_quantize(const Tensor& x, const Tensor& levels, std::string_view granularity, const optional<Tensor>& key) {
  const auto format = granularity.find('|');
  if (x.numel() > 0 && format != std::string_view::npos) {  // a number format on its own range
    const auto [low, width] = range(x, granularity.substr(0, format));
    return {round_in_range(x, low, width, levels, granularity, key, true), low, width};
  }
  if (x.numel() > 0) {
    const Tensor held = dense(x);
    auto found = quantized(held, held.is_same(x) ? Tensor() : held, levels, std::string(granularity), key);
    if (found) {
      auto& [y, low, width] = *found;
      return {y.to(x.scalar_type()), low, width};
    }
  }
  return reference<decltype(fake_quantize)>("fake_quantize", x, levels, granularity, key);
}

// The elements of x on the grid of given ranges: their values (float) or their codes (int8_t); nothing where the
// ranges do not fit. `out` may be `held` itself.
template <typename T>
optional<Tensor> on_grid(const Tensor& held, Tensor out, const Tensor& low, const Tensor& width, const Tensor& levels,
                         const optional<Tensor>& key, bool clip) {
  const int64_t dims = held.dim(), missing = dims - low.dim();
  if (missing < 0 || low.sizes() != width.sizes() || low.scalar_type() != at::kFloat ||
      width.scalar_type() != at::kFloat) {
    return std::nullopt;
  }
  std::vector<bool> mask(dims, false);
  for (int64_t d = 0; d < low.dim(); ++d) {
    mask[d + missing] = low.size(d) != 1;
    if (low.size(d) != 1 && low.size(d) != held.size(d + missing)) return std::nullopt;
  }
  const auto l = layout_of(held, mask);
  if (!l) return std::nullopt;
  // ranges in the order in which x lies in memory
  Tensor a = low, w = width;
  if (low.numel() > 1) {
    std::vector<int64_t> order;
    for (int64_t d : l->order)
      if (mask[d]) order.push_back(d - missing);
    for (int64_t d = 0; d < low.dim(); ++d)
      if (!mask[d + missing]) order.push_back(d);
    a = low.permute(order).contiguous();
    w = width.permute(order).contiguous();
  }
  rounded(*l, held.const_data_ptr<float>(), out.mutable_data_ptr<T>(), const_cast<float*>(a.const_data_ptr<float>()),
          const_cast<float*>(w.const_data_ptr<float>()), grid_of(levels, key, clip), false);
  return out;
}

Tensor round_to_grid(const Tensor& x, const Tensor& low, const Tensor& width, const Tensor& levels,
                     const optional<Tensor>& key, bool clip) {
  if (x.numel() > 0) {
    const Tensor held = dense(x);
    const Tensor out = held.is_same(x) ? at::empty_like(held) : held;
    if (on_grid<float>(held, out, low, width, levels, key, clip)) return out.to(x.scalar_type());
  }
  return reference<decltype(round_to_grid)>("round_to_grid", x, low, width, levels, key, clip);
}

Tensor encode(const Tensor& x, const Tensor& low, const Tensor& width, const Tensor& levels,
              const optional<Tensor>& key, bool clip, bool channels_last) {
  if (x.numel() > 0) {
    const Tensor held = dense(x);
    if (channels_last && held.dim() == 4 && held.is_contiguous() && low.numel() == 1 && width.numel() == 1) {
      return encode_channels_last(held, low.item<float>(), width.item<float>(), grid_of(levels, key, clip));
    }
    const Tensor out = at::empty_like(held, held.options().dtype(at::kChar));
    if (on_grid<int8_t>(held, out, low, width, levels, key, clip)) {
      return channels_last ? out.contiguous(at::MemoryFormat::ChannelsLast) : out;
    }
  }
  return reference<decltype(encode)>("encode", x, low, width, levels, key, clip, channels_last);
}

void follow(float* running, float low, float width) {
  const float now[3] = {low, width, 1.f};
  if (!std::isfinite(low) || !std::isfinite(width)) return;
  for (int i = 0; i < 3; ++i) running[i] = running[i] * RUNNING_DECAY + now[i] * NEW_SHARE;
}

void track_(const Tensor& running, const Tensor& low, const Tensor& width) {
  follow(running.mutable_data_ptr<float>(), *low.const_data_ptr<float>(), *width.const_data_ptr<float>());
}

Tensor pixel_products(const Tensor& gradient, const Tensor& x, const Tensor& zero, at::IntArrayRef kernel,
                      at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation) {
  const auto found = fast_pixel_products(gradient, x, zero, kernel, stride, padding, dilation);
  if (found) return *found;
  return reference<decltype(pixel_products)>("pixel_products", gradient, x, zero, kernel, stride, padding, dilation);
}

// --- graph convolutions ------------------------------------------------------------------------------------------

// Whether rows are rounded on one range, or on one each; nothing where it is neither.
optional<bool> whole_of(std::string_view granularity) {
  if (granularity == "per_row") return false;
  if (granularity == "per_tensor" || granularity == "per_position") return true;
  return std::nullopt;
}

Tensor scale_round(const Tensor& x, const Tensor& scale, const Tensor& levels, std::string_view granularity) {
  const auto whole = whole_of(granularity);
  if (whole && fits(x) && fits_rows(x, scale)) return round_rows(x, scale, std::nullopt, number(levels), *whole);
  return reference<decltype(scale_round)>("scale_round", x, scale, levels, granularity);
}

Tensor scale_round_add(const Tensor& x, const optional<Tensor>& scale, const Tensor& bias, const Tensor& levels,
                       std::string_view granularity) {
  const auto whole = whole_of(granularity);
  if (whole && fits(x) && fits_rows(x, scale) && fits_columns(x, bias)) {
    return round_rows(x, scale, bias, number(levels), *whole);
  }
  return reference<decltype(scale_round_add)>("scale_round_add", x, scale, bias, levels, granularity);
}

// Of two roundings, the second with the noise of the next key.
std::pair<Grid, Grid> grids_of(const Tensor& levels, const optional<Tensor>& key) {
  const Grid first = grid_of(levels, key, key.has_value());
  Grid second = first;
  if (key) second.key.emplace(*key->const_data_ptr<int64_t>() + 1);
  return {first, second};
}

std::tuple<Tensor, Tensor> round_scale_round(const Tensor& gradient, const optional<Tensor>& scale,
                                             const Tensor& levels, const optional<Tensor>& key) {
  if (!fits(gradient) || !fits_rows(gradient, scale)) {
    return reference<decltype(round_scale_round)>("round_scale_round", gradient, scale, levels, key);
  }
  const auto [first, second] = grids_of(levels, key);
  return round_twice(gradient, scale, first, second);
}

Tensor sum_neighbours(const Tensor& codes, const Tensor& zero, const Tensor& scale, const Tensor& rest,
                      const Tensor& indptr, const Tensor& indices) {
  const bool wide = indices.scalar_type() == at::kLong;
  TORCH_CHECK(codes.dim() == 2 && codes.scalar_type() == at::kChar, "codes must be int8, a row for every node");
  TORCH_CHECK(indptr.dim() == 1 && indptr.size(0) > 0 && indices.dim() == 1 && indptr.is_contiguous() &&
                  indices.is_contiguous() && indptr.scalar_type() == indices.scalar_type() &&
                  (wide || indices.scalar_type() == at::kInt),
              "edges must be int32 or int64 without gaps");
  const auto sum = wide ? sum_rows<int64_t> : sum_rows<int32_t>;
  return sum(codes.contiguous(), static_cast<int64_t>(number(zero)), number(scale), number(rest), indptr, indices);
}

// --- autograd ----------------------------------------------------------------------------------------------------

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A rounding of x hands the gradient of its first result on as it is; the others, the range, have none.
struct FakeQuantize : torch::autograd::Function<FakeQuantize> {
  template <typename F>
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const F& round) {
    at::AutoDispatchBelowADInplaceOrView guard;
    variable_list found = round(x);
    ctx->mark_non_differentiable({found.begin() + 1, found.end()});
    ctx->set_materialize_grads(false);  // no zeros for ranges that nothing is derived by
    return found;
  }
  static variable_list backward(AutogradContext*, variable_list grads) { return {grads[0], Tensor()}; }
};

Tensor round_autograd(const Tensor& x, const Tensor& low, const Tensor& width, const Tensor& levels,
                      const optional<Tensor>& key, bool clip) {
  static const auto op = operator_named<decltype(round_to_grid)>("cpt::round_to_grid");
  return FakeQuantize::apply(x, [&](const Tensor& x) -> variable_list {
    return {op.call(x, low, width, levels, key, clip)};
  })[0];
}

Three fake_quantize_autograd(const Tensor& x, const Tensor& levels, std::string_view granularity,
                             const optional<Tensor>& key) {
  static const auto op = operator_named<decltype(fake_quantize)>("cpt::fake_quantize");
  const auto found = FakeQuantize::apply(x, [&](const Tensor& x) -> variable_list {
    auto [y, low, width] = op.call(x, levels, granularity, key);
    return {y, low, width};
  });
  return {found[0], found[1], found[2]};
}

bool is_watched(const Tensor& x) {
  return at::impl::tensor_has_dispatch(x) || c10::impl::TorchDispatchModeTLS::stack_len() > 0;
}

// Quantises the gradient of an output, in place where nobody else holds it. The levels are filled in place when bits
// change; a backward pass that comes later rounds to those of its forward pass.
struct GradientRounding {
  Tensor levels;
  optional<Tensor> key;
  std::string granularity;
  optional<float> forward_levels;

  GradientRounding() = default;
  GradientRounding(Tensor levels, const optional<Tensor>& key, std::string_view granularity)
      : levels(std::move(levels)), key(key), granularity(granularity), forward_levels(number_in(this->levels)) {}

  // The number, where it can be read without waiting.
  static optional<float> number_in(const Tensor& x) {
    if (!x.is_cpu() || x.scalar_type() != at::kFloat || is_watched(x)) return std::nullopt;
    return *x.const_data_ptr<float>();
  }

  Tensor levels_of_forward() const {
    if (!forward_levels) return levels;
    const auto now = number_in(levels);
    return !now || *now == *forward_levels ? levels : at::full({}, *forward_levels, levels.options());
  }

  Tensor operator()(const Tensor& gradient) const {
    if (!gradient.defined() || gradient.numel() == 0) return gradient;
    if (at::autocast::is_autocast_enabled(at::kCPU)) TORCH_WARN(UNDER_AUTOCAST);
    Tensor rounded;
    const Tensor levels = levels_of_forward();
    const bool own = gradient.use_count() == 1 && gradient.storage().use_count() == 1 && !at::GradMode::is_enabled() &&
                     gradient.layout() == at::kStrided && gradient.scalar_type() == at::kFloat &&
                     gradient.device().is_cpu() && memory_order(gradient) && !gradient.is_inference() &&
                     !is_watched(gradient);
    if (own) {
      at::AutoDispatchBelowADInplaceOrView guard;
      if (round_dense(gradient, gradient, levels, granularity, key)) rounded = gradient;
    }
    if (!rounded.defined()) {
      static const auto op = operator_named<decltype(fake_quantize)>("cpt::fake_quantize");
      rounded = std::get<0>(op.call(gradient, levels, granularity, key));
    }
    if (key) count(*key);
    return rounded;
  }

  static void count(const Tensor& key) {
    if (key.is_cpu() && !is_watched(key)) {
      ++*key.mutable_data_ptr<int64_t>();
    } else {
      at::NoGradGuard no_grad;
      key.add_(1);
    }
  }
};

struct RoundGradient : torch::autograd::Node {
  GradientRounding round;

  variable_list apply(variable_list&& grads) override { return {round(grads[0])}; }

  std::string name() const override { return "RoundGradient"; }

  void release_variables() override {}
};

// Nodes are held by one kind of pointer or another, depending on the release of torch.
template <typename T>
auto make_node() {
  if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<T>();
  } else {
    return c10::make_intrusive<T>();
  }
}

Tensor quantize_gradient(const Tensor& y, const Tensor& levels, const optional<Tensor>& key,
                         std::string_view granularity) {
  Tensor same;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    same = at::alias(y);  // an alias, but no view to autograd: an in-place ReLU may follow
  }
  if (at::GradMode::is_enabled() && y.requires_grad()) {
    auto node = make_node<RoundGradient>();
    node->round = GradientRounding(levels, key, granularity);
    node->set_next_edges(torch::autograd::collect_next_edges(y));
    torch::autograd::set_history(same, node);
  }
  return same;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cpt, m) {
  m.def("quantize_gradient(Tensor y, Tensor levels, Tensor? key, str granularity) -> Tensor");
  m.def(
      "round_blocks(Tensor x, Tensor? range_scale, int mantissa, int min_exponent, int max_exponent, float largest, "
      "bool is_symmetric, Tensor? key) -> Tensor");
}

TORCH_LIBRARY_IMPL(cpt, CPU, m) {
  m.impl("range", range);
  m.impl("round_to_grid", round_to_grid);
  m.impl("fake_quantize", fake_quantize);
  m.impl("round_blocks", round_blocks);
  m.impl("encode", encode);
  m.impl("affine_", affine_);
  m.impl("track_", track_);
  m.impl("window_sums", window_sums);
  m.impl("affine_windows", affine_windows);
  m.impl("pixel_products", pixel_products);
  m.impl("scale_round", scale_round);
  m.impl("scale_round_add", scale_round_add);
  m.impl("round_scale_round", round_scale_round);
  m.impl("sum_neighbours", sum_neighbours);
}

TORCH_LIBRARY_IMPL(cpt, AutogradCPU, m) {
  m.impl("round_to_grid", round_autograd);
  m.impl("fake_quantize", fake_quantize_autograd);
  m.impl("quantize_gradient", quantize_gradient);
}

#include "layer.h"
#include "lstm.h"

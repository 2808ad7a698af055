// A quantised linear layer or convolution in training as one operator, see layers.py: the operands are rounded, and the
// gradient that comes back. Between the two lies torch's own operation, with its own gradients. Any other matmul lies
// between two operators.

#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <string>

namespace {

// How operands are rounded: their levels, the running range of the first, and their grids.
struct Roundings {
  const Tensor &first_levels, &second_levels, &bias_levels;
  const optional<Tensor>& running;
  std::string first, second, bias;
};

struct Rounded {
  Tensor first, second;
  optional<Tensor> bias;
};

bool is_plain(const Tensor& x) {
  return x.scalar_type() == at::kFloat && x.is_cpu() && x.layout() == at::kStrided && x.numel() > 0 &&
         !at::impl::tensor_has_dispatch(x);
}

// x rounded on its own range. The result stands at the place of x in the graph of autograd, so that its gradient is
// that of x, as that of the straight-through estimator is, without a node between.
optional<OnGrid> round_straight_through(const Tensor& x, const Tensor& levels, const std::string& granularity) {
  optional<OnGrid> found;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor held = dense(x);
    found = round_dense(held, held.is_same(x) ? Tensor() : held, levels, granularity, std::nullopt);
  }
  if (found && at::GradMode::is_enabled() && x.requires_grad()) {
    torch::autograd::impl::set_gradient_edge(found->y, torch::autograd::impl::gradient_edge(x));
  }
  return found;
}

// The rounded operands, and the running range followed; nothing where an operand is an unusual one.
optional<Rounded> round_all(const Tensor& first, const Tensor& second, const optional<Tensor>& bias,
                            const Roundings& how) {
  if (!is_plain(first) || !is_plain(second) || (bias && !is_plain(*bias)) || !how.first_levels.is_cpu() ||
      c10::impl::TorchDispatchModeTLS::stack_len() > 0) {
    return std::nullopt;
  }
  const auto x = round_straight_through(first, how.first_levels, how.first);
  const auto w = round_straight_through(second, how.second_levels, how.second);
  optional<OnGrid> b;
  if (bias) b = round_straight_through(*bias, how.bias_levels, how.bias);
  if (!x || !w || (bias && !b)) return std::nullopt;
  const bool is_recomputed = torch::autograd::get_current_graph_task_id() != -1;
  if (how.running && !is_recomputed) follow(how.running->mutable_data_ptr<float>(), x->low, x->width);
  return Rounded{x->y, w->y, bias ? optional<Tensor>(b->y) : std::nullopt};
}

// Rounds the gradient before a node of torch takes it.
struct RoundBefore : torch::autograd::FunctionPreHook {
  GradientRounding round;

  explicit RoundBefore(GradientRounding how) : round(std::move(how)) {}

  variable_list operator()(const variable_list& grads) override { return {round(grads[0])}; }
};

// y, whose gradient will be rounded if there are `levels`: by a hook, which takes less time than a node. A view gets a
// node, since its own is replaced when the view is written to.
Tensor with_rounded_gradient(const Tensor& y, const optional<Tensor>& levels, const optional<Tensor>& key,
                             std::string_view grid) {
  if (!levels || !at::GradMode::is_enabled() || !y.requires_grad()) return y;
  const auto& node = y.grad_fn();
  if (y.is_view() || !node || node->num_inputs() != 1) return quantize_gradient(y, *levels, key, grid);
  node->add_pre_hook(std::make_unique<RoundBefore>(GradientRounding(*levels, key, grid)));
  return y;
}

std::vector<Tensor> round_operands(const Tensor& first, const Tensor& second, const optional<Tensor>& bias,
                                   const Tensor& first_levels, const Tensor& second_levels, const Tensor& bias_levels,
                                   const optional<Tensor>& running, std::string_view first_grid,
                                   std::string_view second_grid, std::string_view bias_grid) {
  const auto operands = round_all(first, second, bias,
                                  {first_levels, second_levels, bias_levels, running, std::string(first_grid),
                                   std::string(second_grid), std::string(bias_grid)});
  if (!operands) return {};
  std::vector<Tensor> found{operands->first, operands->second};
  if (bias) found.push_back(*operands->bias);
  return found;
}

optional<Tensor> quantized_linear(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                                  const Tensor& levels, const Tensor& weight_levels, const Tensor& bias_levels,
                                  const optional<Tensor>& running, std::string_view input_grid,
                                  std::string_view weight_grid, std::string_view bias_grid,
                                  const optional<Tensor>& grad_levels, const optional<Tensor>& key,
                                  std::string_view grad_grid) {
  const auto operands = round_all(x, weight, bias,
                                  {levels, weight_levels, bias_levels, running, std::string(input_grid),
                                   std::string(weight_grid), std::string(bias_grid)});
  if (!operands) return std::nullopt;
  const Tensor y = at::linear(operands->first, operands->second, operands->bias);
  return with_rounded_gradient(y, grad_levels, key, grad_grid);
}

optional<Tensor> quantized_conv2d(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                                  const Tensor& levels, const Tensor& weight_levels, const Tensor& bias_levels,
                                  const optional<Tensor>& running, std::string_view input_grid,
                                  std::string_view weight_grid, std::string_view bias_grid,
                                  const optional<Tensor>& grad_levels, const optional<Tensor>& key,
                                  std::string_view grad_grid, at::IntArrayRef stride, at::IntArrayRef padding,
                                  at::IntArrayRef dilation, int64_t groups) {
  const auto operands = round_all(x, weight, bias,
                                  {levels, weight_levels, bias_levels, running, std::string(input_grid),
                                   std::string(weight_grid), std::string(bias_grid)});
  if (!operands) return std::nullopt;
  const Tensor y =
      at::conv2d(operands->first, operands->second, operands->bias, stride, padding, dilation, groups);
  return with_rounded_gradient(y, grad_levels, key, grad_grid);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cpt, m) {
  m.def(
      "round_operands(Tensor first, Tensor second, Tensor? bias, Tensor first_levels, Tensor second_levels, "
      "Tensor bias_levels, Tensor(a!)? running, str first_grid, str second_grid, str bias_grid) -> Tensor[]",
      round_operands);
  m.def("with_rounded_gradient(Tensor y, Tensor? levels, Tensor? key, str grid) -> Tensor", with_rounded_gradient);
  m.def(
      "quantized_linear(Tensor x, Tensor weight, Tensor? bias, Tensor levels, Tensor weight_levels, Tensor bias_levels, "
      "Tensor(a!)? running, str input_grid, str weight_grid, str bias_grid, Tensor? grad_levels, Tensor? key, "
      "str grad_grid) -> Tensor?",
      quantized_linear);
  m.def(
      "quantized_conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor levels, Tensor weight_levels, Tensor bias_levels, "
      "Tensor(a!)? running, str input_grid, str weight_grid, str bias_grid, Tensor? grad_levels, Tensor? key, "
      "str grad_grid, int[2] stride, int[2] padding, int[2] dilation, int groups) -> Tensor?",
      quantized_conv2d);
}

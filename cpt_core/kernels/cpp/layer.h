// A quantised linear layer or convolution in training as one operator, see layers.py: the operands are rounded, and the
// gradient that comes back. Between the two lies torch's own operation, with its own gradients.

#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <string>

namespace {

// How the operands and the gradient of a layer are rounded; no `grad_levels`: the gradient is not.
struct Roundings {
  const Tensor &levels, &weight_levels;
  const optional<Tensor>&grad_levels, &key, &running;
  std::string input, weight, bias, grad;
};

struct Rounded {
  Tensor x, weight;
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
optional<Rounded> round_operands(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                                 const Roundings& how) {
  if (!is_plain(x) || !is_plain(weight) || (bias && !is_plain(*bias)) || !how.levels.is_cpu() ||
      c10::impl::TorchDispatchModeTLS::stack_len() > 0) {
    return std::nullopt;
  }
  const auto rounded_x = round_straight_through(x, how.levels, how.input);
  const auto rounded_weight = round_straight_through(weight, how.weight_levels, how.weight);
  optional<OnGrid> rounded_bias;
  if (bias) rounded_bias = round_straight_through(*bias, how.weight_levels, how.bias);
  if (!rounded_x || !rounded_weight || (bias && !rounded_bias)) return std::nullopt;
  const bool is_recomputed = torch::autograd::get_current_graph_task_id() != -1;
  if (how.running && !is_recomputed) {
    follow(how.running->mutable_data_ptr<float>(), rounded_x->low, rounded_x->width);
  }
  return Rounded{rounded_x->y, rounded_weight->y, bias ? optional<Tensor>(rounded_bias->y) : std::nullopt};
}

// Rounds the gradient before a node of torch takes it.
struct RoundBefore : torch::autograd::FunctionPreHook {
  GradientRounding round;

  explicit RoundBefore(GradientRounding how) : round(std::move(how)) {}

  variable_list operator()(const variable_list& grads) override { return {round(grads[0])}; }
};

// y, whose gradient will be rounded: by a hook, which takes less time than a node. A view gets a node, since its own is
// replaced when the view is written to.
Tensor with_rounded_gradient(const Tensor& y, const Roundings& how) {
  if (!how.grad_levels || !at::GradMode::is_enabled() || !y.requires_grad()) return y;
  const auto& node = y.grad_fn();
  if (y.is_view() || !node || node->num_inputs() != 1) {
    return quantize_gradient(y, *how.grad_levels, how.key, how.grad);
  }
  node->add_pre_hook(std::make_unique<RoundBefore>(GradientRounding{*how.grad_levels, how.key, how.grad}));
  return y;
}

optional<Tensor> quantized_linear(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                                  const Tensor& levels, const Tensor& weight_levels,
                                  const optional<Tensor>& grad_levels, const optional<Tensor>& key,
                                  const optional<Tensor>& running, std::string_view input_grid,
                                  std::string_view weight_grid, std::string_view bias_grid,
                                  std::string_view grad_grid) {
  const Roundings how{levels,  weight_levels, grad_levels, key, running, std::string(input_grid),
                      std::string(weight_grid), std::string(bias_grid), std::string(grad_grid)};
  const auto operands = round_operands(x, weight, bias, how);
  if (!operands) return std::nullopt;
  return with_rounded_gradient(at::linear(operands->x, operands->weight, operands->bias), how);
}

optional<Tensor> quantized_conv2d(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                                  const Tensor& levels, const Tensor& weight_levels,
                                  const optional<Tensor>& grad_levels, const optional<Tensor>& key,
                                  const optional<Tensor>& running, std::string_view input_grid,
                                  std::string_view weight_grid, std::string_view bias_grid,
                                  std::string_view grad_grid, at::IntArrayRef stride, at::IntArrayRef padding,
                                  at::IntArrayRef dilation, int64_t groups) {
  const Roundings how{levels,  weight_levels, grad_levels, key, running, std::string(input_grid),
                      std::string(weight_grid), std::string(bias_grid), std::string(grad_grid)};
  const auto operands = round_operands(x, weight, bias, how);
  if (!operands) return std::nullopt;
  const Tensor y = at::conv2d(operands->x, operands->weight, operands->bias, stride, padding, dilation, groups);
  return with_rounded_gradient(y, how);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cpt, m) {
  m.def(
      "quantized_linear(Tensor x, Tensor weight, Tensor? bias, Tensor levels, Tensor weight_levels, Tensor? grad_levels, "
      "Tensor? key, Tensor(a!)? running, str input_grid, str weight_grid, str bias_grid, str grad_grid) -> Tensor?",
      quantized_linear);
  m.def(
      "quantized_conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor levels, Tensor weight_levels, Tensor? grad_levels, "
      "Tensor? key, Tensor(a!)? running, str input_grid, str weight_grid, str bias_grid, str grad_grid, int[2] stride, "
      "int[2] padding, int[2] dilation, int groups) -> Tensor?",
      quantized_conv2d);
}
